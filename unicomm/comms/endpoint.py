"""Where a communicator can be reached, before its next ranks have anything in common: its init handle.

A communicator that can be reconfigured listens at a port of its own, with a secret that is in its handle:
whoever has the handle may call, a stranger is hung up on. Nothing goes through here but who invites whom to
which attempt (reconfigure.py), and the end of a connection, which is how the death of a rank is noticed.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import HashStore

from . import remote_store
from .errors import BackendError, InvalidArgumentError

LOOPBACK = "127.0.0.1"
_PREFIX = "unicomm:"
_LONGEST_HANDLE = 4096  # characters
_KEY = 16  # bytes of the secret
_HELLO = struct.Struct(f"<{_KEY}sI")  # secret, length of the JSON that follows
_LONGEST = 1 << 16  # bytes of a hello, or of a line
_PATIENCE = 2.0  # seconds in which a caller has to say the secret
_STRANGERS = 64  # callers that may be about to
_KEPT = 64  # invitations that nobody has answered
_BACKLOG = 1024
_HEX = re.compile(r"[0-9a-f]+")
# A host that is gone, or a cable that is cut, is noticed when this many probes, one a second, are unanswered.
_PROBES = 3


def network() -> str:
    """What processes share whose loopback is the same: the booted kernel and the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def notice_silence(s: socket.socket, seconds: int) -> None:
    """Ends a connection when the other host has not answered for four times `seconds`.

    Also while data are on their way, for which the system alone would take a quarter of an hour.
    """
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPINTVL": seconds,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": 1000 * seconds * (_PROBES + 1),
    }
    for option, value in options.items():
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket at exactly that address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True)
class Handle:
    """An init handle, read.

    Attributes:
        id: of the communicator on its rank. backend: its name.
        key: the secret, in hexadecimal digits. network: see `network`.
        at: addresses to call, loopback first; none where ranks do not meet (fake).
    """

    id: str
    backend: str
    key: str
    network: str
    at: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        fields = {"id": self.id, "of": self.backend, "key": self.key, "net": self.network, "at": self.at}
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()

    @classmethod
    def read(cls, text: Any) -> Handle:
        """Raises `InvalidArgumentError` for what `get_init_handle` has not returned."""
        try:
            if not isinstance(text, str) or len(text) > _LONGEST_HANDLE or not text.startswith(_PREFIX):
                raise ValueError
            data = json.loads(base64.urlsafe_b64decode(text[len(_PREFIX) :].encode()))
            words = [data["id"], data["of"], data["key"], data["net"]]
            at = tuple((host, port) for host, port in data["at"])
            good = all(isinstance(word, str) for word in words) and len(at) <= 8
            good = good and all(isinstance(h, str) and type(p) is int and 0 < p < 1 << 16 for h, p in at)
            if not good or len(data["key"]) != 2 * _KEY or not all(map(_HEX.fullmatch, (words[0], words[2]))):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            shown = repr(text)
            raise InvalidArgumentError(
                f"{shown if len(shown) < 80 else shown[:77] + '...'} is no init handle",
                op="reconfigure",
                hint="pass what get_init_handle() returned on each rank, unchanged",
            ) from None
        return cls(data["id"], data["of"], data["key"], data["net"], at)

    def address(self, here: str) -> tuple[str, int]:
        """Where a process of the network `here` reaches it."""
        return self.at[0] if self.network == here else self.at[-1]


class Lines:
    """Reads JSON objects, one a line, from a socket that does not block."""

    def __init__(self, s: socket.socket, begun: bytes = b"") -> None:
        self.socket = s
        self.gone = False
        self._said = bytearray(begun)

    def read(self) -> list[dict[str, Any]]:
        """What has come; sets `gone` when the other end is closed, or says what nobody of ours says."""
        while not self.gone:
            try:
                data = self.socket.recv(_LONGEST)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            self._said += data
            self.gone = not data or len(self._said) > _LONGEST
        found = []
        while (end := self._said.find(b"\n")) >= 0:
            line = bytes(self._said[:end])
            del self._said[: end + 1]
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self.gone = True
                break
            found.append(value)
        return found

    def tell(self, value: Mapping[str, Any]) -> None:
        """Sends a line if the other end is there and takes it; a few hundred bytes always fit."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(value).encode() + b"\n")


def call(handle: Handle, here: str, hello: Mapping[str, Any], timeout: float) -> Lines:
    """Calls a communicator; `OSError` when it is not there. The caller closes the socket."""
    s = socket.create_connection(handle.address(here), timeout)
    try:
        said = json.dumps(hello).encode()
        s.sendall(_HELLO.pack(bytes.fromhex(handle.key), len(said)) + said)
        notice_silence(s, 1)
        s.setblocking(False)
    except OSError:
        s.close()
        raise
    return Lines(s)


class Guest:
    """A caller. `hello`: what it has said, None as long as it has not."""

    def __init__(self, s: socket.socket) -> None:
        self.socket = s
        self.hello: dict[str, Any] | None = None
        self.until = time.monotonic() + _PATIENCE
        self.said = bytearray()
        self.lines: list[dict[str, Any]] = []
        self.gone = False
        self.reader: Lines | None = None
        self.store: HashStore | None = None  # what it uses, by frames instead of lines
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
        """Raises `BackendError` when it cannot listen at `hosts`, which are none where ranks do not meet."""
        self.network = network()
        self._changed = threading.Condition()
        self._invited: list[Guest] = []  # who has invited this rank, the newest last
        self._guests: set[Guest] = set()
        self._entered: dict[int, str] = {}  # attempts that this rank has come to, and with whom
        self._stores: dict[int, HashStore] = {}  # by attempt
        self._over: dict[int, dict[str, Any]] = {}  # attempts that this rank is done with, and what to say
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
                hint="are there file descriptors left (ulimit -n)? leave enable_reconfigure off",
            ) from error
        at = tuple((str(s.getsockname()[0]), int(s.getsockname()[1])) for s in self._listeners[: len(hosts)])
        self.handle = Handle(secrets.token_hex(8), backend, secrets.token_hex(_KEY), self.network, at)
        self._key = bytes.fromhex(self.handle.key)
        if hosts:
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, None)
            self._thread = threading.Thread(target=self._loop, name=f"unicomm-endpoint-{name}", daemon=True)
            self._thread.start()

    def enter(self, uuid: int, group: str) -> None:
        """This rank has come to that attempt, for those who ask."""
        with self._changed:
            self._entered[uuid] = group
            if len(self._entered) > _KEPT:
                del self._entered[next(iter(self._entered))]

    def leave(self, uuid: int, farewell: dict[str, Any]) -> None:
        """This rank is done with that attempt: who calls about it hears `farewell`."""
        with self._changed:
            self._over[uuid] = farewell
            if len(self._over) > _KEPT:
                del self._over[next(iter(self._over))]
            for guest in self._guests:
                if guest.hello is not None and uuid in (guest.hello.get("probe"), guest.hello.get("invite")):
                    guest.tell(farewell)

    def serve(self, uuid: int, store: HashStore) -> None:
        """Others who ask for the store of that attempt may use it, and those of earlier ones no longer."""
        self.serve_nothing()
        self._stores[uuid] = store

    def serve_nothing(self) -> None:
        with self._changed:
            self._stores.clear()
            for guest in self._guests:
                if guest.store is not None:
                    guest.leave()

    def invitation(self, uuid: int, seconds: float) -> Guest | None:
        """Who has invited this rank to the attempt; waits for that at most `seconds`."""
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
        self._wake.close()

    def forget(self) -> None:
        """In a forked child, which has no such thread: the connections are the parent's."""
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
            # The one who has been silent for longest: who belongs here speaks at once.
            self._end(min(strangers, key=lambda guest: guest.until))
        s.setblocking(False)
        notice_silence(s, 1)
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
                data = guest.socket.recv(_LONGEST)
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
        except (ValueError, RuntimeError):
            self._end(guest)
            return
        self._send(guest)

    def _send(self, guest: Guest) -> None:
        """What fits; the rest when there is room, and no more is read before."""
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
        """Reads the hello; True when it is complete and right."""
        try:
            data = guest.socket.recv(_LONGEST)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        guest.said += data
        if not data:
            self._end(guest)
            return False
        if len(guest.said) < _HELLO.size:
            return False
        key, length = _HELLO.unpack_from(guest.said)
        if not hmac.compare_digest(key, self._key) or length > _LONGEST:
            self._end(guest)
            return False
        if len(guest.said) < _HELLO.size + length:
            return False
        try:
            hello = json.loads(bytes(guest.said[_HELLO.size : _HELLO.size + length]))
            if not isinstance(hello, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self._end(guest)
            return False
        del guest.said[: _HELLO.size + length]
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
