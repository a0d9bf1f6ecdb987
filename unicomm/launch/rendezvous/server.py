"""The store of the launchers, in the launcher that hosts the rendezvous.

A thread serves it. Before a caller has proved that it knows the job's token (connections.py) it may send 73
bytes, within ten seconds, and none of them is looked at but to check the proof. Requests are those of
comms/membership/remote_store.py, none of which waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import sys
import threading
import time
from collections.abc import Sequence

from unicomm.c10d.compat import HashStore
from unicomm.comms.membership import remote_store
from unicomm.comms.membership.handles import notice_silence

from . import connections
from .connections import HELLO, LENGTH, MAC, Greeting, NoLauncherError

_PATIENCE = 10.0  # seconds in which a caller has to prove that it knows the token
_STRANGERS = 256  # callers that have not yet
_SILENT = 40  # seconds without an answer after which the connection to another host ends
_ENDING = 5.0  # seconds that the thread may need to end
_TURNS = 10  # of the event loop, from the call of a stranger to the task that serves it: about four


class StoreServer:
    """Serves a store at these sockets until `close`."""

    def __init__(self, listeners: Sequence[socket.socket], token: str) -> None:
        self._listeners, self._token = listeners, token
        self._store = HashStore()
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        self._callers = 0  # who know the token
        self._warned = False
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unicomm-rendezvous", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self, seconds: float = 0.0) -> None:
        """Ends the thread and all connections; gives the callers `seconds` to leave before."""
        end = time.monotonic() + seconds
        while self._callers and time.monotonic() < end:
            time.sleep(0.01)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_ENDING)

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    def _end(self) -> None:
        if self._ended is not None:
            self._ended.set()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        servers = [
            await asyncio.start_server(self._called, sock=s, limit=1 << 16, backlog=1024)
            for s in self._listeners
        ]
        self._ready.set()
        await self._ended.wait()
        # What was accepted gets its task, whose end closes it: asyncio forgets a socket that was accepted
        # just before its server is closed.
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._strangers[writer] = None
        if len(self._strangers) > _STRANGERS:
            next(iter(self._strangers)).transport.abort()  # silent for longest: a launcher sends at once
        try:
            notice_silence(writer.get_extra_info("socket"), _SILENT)
            greeting = await asyncio.wait_for(self._greet(reader, writer), _PATIENCE)
            self._strangers.pop(writer, None)
            if greeting is not None:
                self._callers += 1
                try:
                    await self._answer(reader, writer, greeting)
                finally:
                    self._callers -= 1
        except (OSError, EOFError, ValueError, RuntimeError, NoLauncherError, asyncio.TimeoutError):
            pass  # whoever it was is gone, or is no launcher of this job
        except asyncio.CancelledError:
            pass  # the server ends; asyncio's streams print a cancelled task as an error
        finally:
            self._strangers.pop(writer, None)
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Greeting | None:
        """Returns the greeting that the caller has answered; None if it does not know the token."""
        hello = await reader.readexactly(HELLO.size)
        caller = str(writer.get_extra_info("peername")[0])
        greeting = connections.welcome(hello, self._token, caller)
        writer.write(greeting.welcome)
        await writer.drain()
        proof = await reader.readexactly(MAC)
        if hmac.compare_digest(proof, greeting.proof):
            return greeting
        if not self._warned:  # once: a stranger must not fill the log
            self._warned = True
            print(f"unicomm run: refused {caller}, which has another token", file=sys.stderr, flush=True)
        return None

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, greeting: Greeting
    ) -> None:
        said = bytearray()
        while True:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > connections.LONGEST:
                raise ValueError
            data = await reader.readexactly(length)
            greeting.seals.caller.check(data, await reader.readexactly(MAC))
            said += data
            while (found := remote_store.take_frame(said)) is not None:
                answer = remote_store.answer(self._store, *found)
                writer.write(LENGTH.pack(len(answer)) + answer + greeting.seals.host.sign(answer))
            await writer.drain()
