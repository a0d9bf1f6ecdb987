"""The hub's process, which runs beside the launcher of each host and serves the rings of a job.

    python -m unicomm.launch.hub.server        # started by `unicomm run`, which writes commands to its stdin

The hub reads rings, which costs the ranks nothing, and takes no part in operations: a job runs on without it,
or when it is stopped or killed. protocol.py lists the requests. The hubs of the first hosts (the directories)
know the hubs of all others; when a rank fails, the first directory that answers gathers the rings.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from unicomm.launch.side_process import live_with_the_launcher

from . import gather, protocol
from .protocol import AnyAnswer, AnyRequest, HubConnection, HubError

_MOST_AT_ONCE = 32  # requests under way in the pool
_MOST_HOSTS = 1 << 16
_MOST_ROUNDS = 4
_WORKERS = 8
_DOMAIN = "unicomm"
PATIENCE = 2.0  # seconds in which another hub has to answer a small request
GATHERING = 20.0  # seconds in which another hub has to gather
_TRANSFERS = 15.0  # of these, seconds for copying rings


class Hub:
    """Serves one launcher; `tell` sends the launcher a message."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._pool = ThreadPoolExecutor(_WORKERS, "hub")
        self._busy = 0
        self._answers: queue.SimpleQueue[tuple[bytes, AnyAnswer]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._token = self._address = ""
        self._place: gather.RingFolders | None = None
        self._host, self._hosts, self._round = 0, 1, ""
        self._directories: dict[int, tuple[str, str]] = {}  # host: (address, round)
        self._announced: dict[str, dict[int, protocol.Announce]] = {}  # by round
        self._gathering = threading.Lock()
        self._gathered: protocol.Gathered | None = None  # by this hub
        self._told: protocol.Gathered | None = None  # by another hub

    # --- commands of the launcher ----------------------------------------------------------------------

    def open(self, token: str, address: str, port: int, others: bool) -> None:
        """Listens at `port` of `address`; with `others`, at any free port if that one is taken."""
        self._token = token
        self._authenticator = authenticator = ThreadAuthenticator(self._context)  # stops when dropped
        authenticator.start()
        authenticator.configure_curve_callback(_DOMAIN, protocol.GuestKeyCheck(token))
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.maxmsgsize = protocol.MOST_ASKED
        router.rcvhwm, router.sndhwm = 64, 4
        router.handshake_ivl = 5000
        router.ipv6 = ":" in address
        router.zap_domain = _DOMAIN.encode()
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = protocol.keys(token, "hub")
        for wanted in (port, 0) if others and port else (port,):
            try:
                router.bind(protocol.zmq_address(address, wanted))
            except zmq.ZMQError as error:
                why = f"cannot listen at {address}, port {wanted}: {error}"
            else:
                self._router = router
                bound = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
                self._address = protocol.zmq_address(address, bound)
                self._tell({"say": "open", "address": address, "port": bound})
                return
        router.close()
        self._tell({"say": "closed", "why": why})

    def attempt(self, rings: str, frozen: str, job: str) -> None:
        """New processes run now, and write their rings to other folders."""
        self._place = gather.RingFolders(Path(rings), Path(frozen), Path(job))
        self._gathered = self._told = None

    def join(self, host: int, hosts: int, round: str, directories: list[tuple[int, str, str]]) -> None:
        """Sets this host's number in the job, and (number, address, round) of the directories."""
        self._host, self._hosts, self._round = host, hosts, round
        self._directories = {number: (address, theirs) for number, address, theirs in directories}
        self._pool.submit(self._introduce)

    def note(self, what: str) -> None:
        """Writes a line into the log."""
        print(what, file=sys.stderr, flush=True)

    def failed(self) -> None:
        """Reacts to a failed rank of this host: the launcher waits for the result of gathering."""
        self._tell({"say": "gathering"})
        self._pool.submit(self._report)

    # --- other hubs --------------------------------------------------------------------------------------

    def _ask(self, address: str, request: AnyRequest, seconds: float) -> Any:
        with HubConnection(self._context, address, self._token) as hub:
            return hub.ask(request, seconds)

    def _introduce(self) -> None:
        for number, (address, round) in sorted(self._directories.items()):
            if number == self._host:
                continue
            hello = protocol.Announce(self._host, self._address, socket.gethostname(), round)
            for _ in range(3):
                with contextlib.suppress(HubError):
                    self._ask(address, hello, PATIENCE)
                    break

    def _peers(self) -> dict[int, protocol.Announce]:
        return {n: a for n, a in self._announced.get(self._round, {}).items() if n != self._host}

    def _first_directory(self) -> tuple[int, str]:
        """Returns number and address of the first directory that answers; of this hub if none does."""
        for number, (address, _) in sorted(self._directories.items()):
            if number == self._host:
                break
            with contextlib.suppress(HubError):
                self._ask(address, protocol.Ping(), PATIENCE)
                return number, address
        return self._host, self._address

    def _report(self) -> None:
        try:
            here = False
            if (found := self._told) is None:
                number, address = self._first_directory()
                here = number == self._host
                found = self._gather() if here else self._ask(address, protocol.Gather(), GATHERING)
            self._tell({"say": "gathered", "here": here} | msgspec.structs.asdict(found))
        except Exception as error:
            self._tell({"say": "not gathered", "why": str(error)})

    def _gather(self) -> protocol.Gathered:
        with self._gathering:
            if self._gathered is None:
                place = self._where()
                end = time.monotonic() + PATIENCE
                while len(self._peers()) + 1 < self._hosts and time.monotonic() < end:
                    time.sleep(0.02)  # hubs that have just started are about to announce themselves
                asking = gather.OtherHubs(
                    self._context, self._token, list(self._peers().values()), self._hosts
                )
                self._gathered = gather.gather(place, asking, _TRANSFERS, PATIENCE)
            return self._gathered

    # --- requests --------------------------------------------------------------------------------------

    def _where(self) -> gather.RingFolders:
        if self._place is None:
            raise HubError("no ranks were started yet")
        return self._place

    def _handle(self, request: AnyRequest) -> AnyAnswer:
        match request:
            case protocol.Look():
                return self._look(request)
            case protocol.Files():
                return protocol.Listing(self._where().files())
            case protocol.Read():
                return self._where().read(request.name, request.offset)
            case protocol.Gather():
                return self._gather()
        raise HubError("a request that hubs do not answer")

    def _look(self, request: protocol.Look) -> protocol.Rings:
        place = self._where()
        if not request.everywhere:
            return gather.look(place, request.records)
        if self._hosts > 1 and self._host not in self._directories:
            number, address = self._first_directory()
            if number != self._host:
                answer = self._ask(address, request, 2 * PATIENCE)
                if isinstance(answer, protocol.Rings):
                    return answer
        asking = gather.OtherHubs(self._context, self._token, list(self._peers().values()), self._hosts)
        return gather.look_everywhere(place, request.records, asking, PATIENCE)

    def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        who, data = frames
        try:
            request = protocol.read_request(data)
        except HubError as error:
            self._answer(who, protocol.Refused(str(error)))
            return
        match request:
            case protocol.Ping():
                self._answer(who, protocol.Done())
            case protocol.Announce():
                self._answer(who, self._note(request))
            case protocol.Tell():
                self._told = request.found
                self._answer(who, protocol.Done())
            case _ if self._busy >= _MOST_AT_ONCE:
                self._answer(who, protocol.Refused("too many requests at once; try again"))
            case _:
                self._busy += 1
                self._pool.submit(self._work, who, request)

    def _note(self, request: protocol.Announce) -> AnyAnswer:
        if not 0 <= request.host < _MOST_HOSTS:
            return protocol.Refused(f"there is no host number {request.host}")
        known = self._announced.setdefault(request.round[:64], {})
        known[request.host] = request
        while len(self._announced) > _MOST_ROUNDS:
            del self._announced[next(iter(self._announced))]
        return protocol.Done()

    def _work(self, who: bytes, request: AnyRequest) -> None:
        try:
            answer = self._handle(request)
        except Exception as error:
            answer = protocol.Refused(str(error)[:1000] or type(error).__name__)
        self._answers.put((who, answer))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _answer(self, who: bytes, answer: AnyAnswer) -> None:
        assert self._router is not None
        with contextlib.suppress(zmq.ZMQError):  # who does not take it does not get it
            # libzmq drops an answer if its queue for this client is full. That the client has taken earlier
            # ones it learns from commands of its own threads, which sending handles once a millisecond at
            # most. Reading the events handles all of them.
            self._router.get(zmq.EVENTS)
            self._router.send_multipart([who, protocol.encode(answer)], zmq.NOBLOCK)

    # --- the loop --------------------------------------------------------------------------------------

    def run(self, commands: int) -> None:
        """Serves until the launcher is gone. `commands`: a descriptor with a line of JSON per command."""
        poller, opened, pending = zmq.Poller(), False, b""
        for descriptor in (commands, self._wake_read):
            poller.register(descriptor, zmq.POLLIN)
        while True:
            if self._router is not None and not opened:
                poller.register(self._router, zmq.POLLIN)
                opened = True
            ready: dict[Any, int] = dict(poller.poll())
            if commands in ready:
                data = os.read(commands, 1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    getattr(self, said.pop("do"))(**said)
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 12)
                while not self._answers.empty():
                    self._busy -= 1
                    self._answer(*self._answers.get())
            if self._router is not None and self._router in ready:
                for _ in range(64):
                    try:
                        frames = self._router.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._received(frames)


def main() -> None:
    live_with_the_launcher()
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    code = 0
    try:
        Hub(tell).run(0)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with its threads, and requests that are under way: nobody waits for them any more


if __name__ == "__main__":
    main()
