"""Endpoint: where other ranks reach a communicator that can be reconfigured.

Each such communicator listens at a port of its own, which its init handle names (handles.py). A caller that
does not know the secret is disconnected. Three things go through an endpoint: invitations to an attempt
(reconfigure_session.py), requests to the store in which the ranks meet, and the end of a connection, by which
the death of a rank is noticed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unicomm.c10d.compat import HashStore
from unicomm.comms.errors import BackendError
from unicomm.comms.failures.thread_start import start

from . import remote_store, store_users
from .handles import HELLO, KEY, LONGEST, Handle, Lines, listen, network, notice_silence

_PATIENCE = 2.0  # seconds in which a caller has to send the secret
_STRANGERS = 64  # callers that have not sent it yet
_KEPT = 64  # unanswered invitations, and attempts, that are remembered


class Guest:
    """A caller. `hello` is its first object, None until it has come."""

    def __init__(self, s: socket.socket) -> None:
        self.socket = s
        self.hello: dict[str, Any] | None = None
        self.until = time.monotonic() + _PATIENCE
        self.said = bytearray()
        self.lines: list[dict[str, Any]] = []
        self.gone = False
        self.reader: Lines | None = None
        self.store: HashStore | None = None  # the store that it uses, by frames instead of lines
        self.unsent = bytearray()

    def tell(self, value: Mapping[str, Any]) -> None:
        if self.reader is not None:
            self.reader.tell(value)

    def leave(self) -> None:
        """Ends the connection, from any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Endpoint:
    """Listens for one communicator, in a thread of its own, until `close`."""

    def __init__(self, hosts: Sequence[str], backend: str, name: str) -> None:
        """Raises `BackendError` if it cannot listen at `hosts`. `hosts` is empty where ranks do not meet."""
        self.network = network()
        self._changed = threading.Condition()
        self._invited: list[Guest] = []  # callers that have invited this rank, the newest last
        self._guests: set[Guest] = set()
        self._entered: dict[int, str] = {}  # by attempt of this rank: its list of ranks
        self._stores: dict[int, HashStore] = {}  # by attempt
        self._answered = 0  # requests to stores
        self._over: dict[int, dict[str, Any]] = {}  # by attempt that this rank has left: the farewell
        self._thread: threading.Thread | None = None
        self._listeners: list[socket.socket] = []
        try:
            for host in hosts:
                self._listeners.append(listen(host))
            if hosts:
                self._selector = selectors.DefaultSelector()
                self._wake, theirs = socket.socketpair()
                self._listeners.append(theirs)
        except OSError as error:
            for listener in self._listeners:
                listener.close()
            raise BackendError(
                f"cannot listen for later reconfigurations: {error}",
                comm=name,
                hint="are there file descriptors left (ulimit -n)? else leave enable_reconfigure off",
            ) from error
        at = tuple((str(s.getsockname()[0]), int(s.getsockname()[1])) for s in self._listeners[: len(hosts)])
        self.handle = Handle(secrets.token_hex(8), backend, secrets.token_hex(KEY), self.network, at)
        self._key = bytes.fromhex(self.handle.key)
        if hosts:
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, None)
            name = f"unicomm-endpoint-{name}"
            self._thread = start(threading.Thread(target=self._loop, name=name, daemon=True))

    def enter(self, uuid: int, group: str) -> None:
        """This rank takes part in the attempt; ranks that ask are told."""
        with self._changed:
            self._entered[uuid] = group
            if len(self._entered) > _KEPT:
                del self._entered[next(iter(self._entered))]

    def leave(self, uuid: int, farewell: dict[str, Any]) -> None:
        """This rank has left the attempt; ranks that call about it are told `farewell`."""
        with self._changed:
            self._over[uuid] = farewell
            if len(self._over) > _KEPT:
                del self._over[next(iter(self._over))]
            for guest in self._guests:
                if guest.hello is not None and uuid in (guest.hello.get("probe"), guest.hello.get("invite")):
                    guest.tell(farewell)

    def serve(self, uuid: int, store: HashStore) -> None:
        """Serves the store of the attempt to other ranks, and the stores of earlier attempts no longer."""
        self.serve_nothing()
        self._stores[uuid] = store

    def answered(self) -> int:
        """Returns how many requests to its stores this endpoint has answered so far."""
        return self._answered

    def serve_nothing(self) -> None:
        with self._changed:
            self._end_stores()
            for guest in self._guests:
                if guest.store is not None:
                    guest.leave()

    def _end_stores(self) -> None:
        for store in self._stores.values():
            store_users.end(store)
        self._stores.clear()

    def invitation(self, uuid: int, seconds: float) -> Guest | None:
        """The caller that has invited this rank to the attempt; waits for it at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(uuid) is not None, seconds)
            guest = self._find(uuid)
            if guest is not None:
                self._invited.remove(guest)
            return guest

    def _find(self, uuid: int) -> Guest | None:
        return next((g for g in reversed(self._invited) if g.hello and g.hello["invite"] == uuid), None)

    def close(self) -> None:
        """Ends all connections and the thread."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        if thread is not threading.current_thread():
            thread.join()
        self._end_stores()
        self._wake.close()

    def forget(self) -> None:
        """In a forked child, which has no such thread. The connections are the parent's."""
        if self._thread is not None:
            self._thread = None
            for s in (*self._listeners, self._wake, *(guest.socket for guest in self._guests)):
                s.close()
            self._selector.close()

    # --- the thread --------------------------------------------------------------------------------------

    def _loop(self) -> None:
        wake = self._listeners[-1]
        open_ = True
        while open_:
            strangers = [guest for guest in self._guests if guest.hello is None]
            wait = min((guest.until for guest in strangers), default=None)
            for key, _ in self._selector.select(None if wait is None else max(0.0, wait - time.monotonic())):
                if key.fileobj is wake:
                    open_ = False
                elif key.data is None:
                    self._accept(key.fileobj)
                elif key.events & selectors.EVENT_WRITE:
                    self._send(key.data)
                else:
                    self._read(key.data)
            now = time.monotonic()
            for guest in strangers:
                if guest.hello is None and guest.until < now:
                    self._end(guest)
        for guest in list(self._guests):
            self._end(guest)
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _accept(self, listener: Any) -> None:
        try:
            s = listener.accept()[0]
        except OSError:
            return
        strangers = [guest for guest in self._guests if guest.hello is None]
        if len(strangers) >= _STRANGERS:
            # The caller that has been silent for longest: a rank of ours sends at once.
            self._end(min(strangers, key=lambda guest: guest.until))
        s.setblocking(False)
        notice_silence(s)
        guest = Guest(s)
        with self._changed:
            self._guests.add(guest)
        self._selector.register(s, selectors.EVENT_READ, guest)

    def _end(self, guest: Guest) -> None:
        with self._changed:
            if guest in self._guests:
                self._guests.discard(guest)
                self._selector.unregister(guest.socket)
                guest.socket.close()
            guest.gone = True
            self._changed.notify_all()

    def _read(self, guest: Guest) -> None:
        if guest.reader is None and not self._greet(guest):
            return
        assert guest.reader is not None
        if guest.store is not None:
            self._answer(guest, guest.store)
            return
        lines = guest.reader.read()
        with self._changed:
            guest.lines += lines
            self._changed.notify_all()
        if guest.reader.gone:
            self._end(guest)

    def _answer(self, guest: Guest, store: HashStore) -> None:
        try:
            while True:
                data = guest.socket.recv(LONGEST)
                if not data:
                    raise ConnectionError
                guest.said += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._end(guest)
            return
        try:
            while (found := remote_store.take_frame(guest.said)) is not None:
                guest.unsent += remote_store.answer(store, *found)
                self._answered += 1
        except (ValueError, RuntimeError):
            self._end(guest)
            return
        self._send(guest)

    def _send(self, guest: Guest) -> None:
        """Sends what fits. The rest follows when there is room; nothing is read before."""
        try:
            sent = guest.socket.send(guest.unsent) if guest.unsent else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._end(guest)
            return
        del guest.unsent[:sent]
        wanted = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
        if self._selector.get_key(guest.socket).events != wanted:
            self._selector.modify(guest.socket, wanted, guest)

    def _greet(self, guest: Guest) -> bool:
        """Reads the hello. Returns whether it is complete and valid."""
        try:
            data = guest.socket.recv(LONGEST)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        guest.said += data
        if not data:
            self._end(guest)
            return False
        if len(guest.said) < HELLO.size:
            return False
        key, length = HELLO.unpack_from(guest.said)
        if not hmac.compare_digest(key, self._key) or length > LONGEST:
            self._end(guest)
            return False
        if len(guest.said) < HELLO.size + length:
            return False
        try:
            hello = json.loads(bytes(guest.said[HELLO.size : HELLO.size + length]))
            if not isinstance(hello, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self._end(guest)
            return False
        del guest.said[: HELLO.size + length]
        guest.reader = Lines(guest.socket, bytes(guest.said) if "store" not in hello else b"")
        with self._changed:
            guest.hello = hello
            about = hello.get("invite", hello.get("probe"))
            if type(about) is int and about in self._over:
                guest.tell(self._over[about])
            elif "invite" in hello:
                self._invited.append(guest)
                for old in self._invited[:-_KEPT]:
                    old.leave()
                del self._invited[:-_KEPT]
                self._changed.notify_all()
            elif "store" in hello:
                store = hello["store"]
                guest.store = self._stores.get(store) if type(store) is int else None
                if guest.store is None:
                    guest.leave()
            elif "ask" in hello:
                asked = hello["ask"]
                came = type(asked) is int and self._entered.get(asked, "") == hello.get("group")
                guest.tell({"in": came})
        return True
