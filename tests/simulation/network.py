"""What the code under test gets for `socket` and `selectors`: byte streams between simulated processes.

A stream delivers in order, after a delay, in pieces of any size. It follows what Linux does at an end: a
socket that is closed with unread bytes resets the connection, a write to a closed peer succeeds once, a
process that is killed closes its sockets, and one that is stopped still takes bytes and calls.
"""

from __future__ import annotations

import itertools
import selectors
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from .primitives import Facade, current, current_process
from .scheduler import Process, Task

CAPACITY = 1 << 18  # bytes that a connection holds in one direction
_SPLIT = 0.1  # how often what is written arrives in two pieces
_SHORT = 0.15  # how often a read returns less than there is


class Network:
    """The network of one run: who listens where, and the delays."""

    def __init__(self) -> None:
        self.listeners: dict[tuple[str, int], Socket] = {}
        self.connections: list[tuple[Socket, Socket]] = []
        self.ports = itertools.count(40_000)
        self.numbers = itertools.count(3)
        rng = current().rng
        self.slowest = rng.choice((0.0002, 0.0002, 0.002, 0.03))  # seconds that bytes are under way

    def delay(self) -> float:
        return current().rng.random() * self.slowest

    def reset_between(self, one: Process, other: Process) -> int:
        """Resets all connections between two processes; returns their number."""
        found = [pair for pair in self.connections if {s.process for s in pair} == {one, other}]
        found = [pair for pair in found if not any(s.closed for s in pair)]
        for pair in found:
            for s in pair:
                s.reset()
        return len(found)


_network: list[Network] = []


def use(network: Network | None) -> None:
    _network[:] = [] if network is None else [network]


class Socket:
    """One end of a byte stream, or a listening socket."""

    def __init__(self) -> None:
        self.number = next(_network[0].numbers)
        self.process = current_process()
        self.peer: Socket | None = None
        self.closed = False
        self.timeout: float | None = None
        self.address = ("", 0)
        self._arrived = bytearray()
        self._under_way = 0
        self._last = 0.0  # when the last bytes to this socket arrive
        self._end = False  # the peer will send nothing more
        self._error: OSError | None = None
        self._write_error: OSError | None = None
        self._shut = False
        self.backlog: list[Socket] | None = None
        self.watchers: list[Task] = []
        self.process.at_end.append(self._closed_by_system)

    # --- state --------------------------------------------------------------------------------------------

    def changed(self) -> None:
        watchers, self.watchers = self.watchers, []
        for task in watchers:
            current().wake(task)

    def readable(self) -> bool:
        if self.backlog is not None:
            return bool(self.backlog)
        return bool(self._arrived or self._end or self._error or self._shut)

    def writable(self) -> bool:
        return bool(self._write_error or self._shut or self._room() > 0)

    def _room(self) -> int:
        peer = self.peer
        return CAPACITY if peer is None else CAPACITY - len(peer._arrived) - peer._under_way

    def reset(self) -> None:
        """The connection ends with an error at this end."""
        self._error = self._error or ConnectionResetError(104, "Connection reset by peer")
        self._write_error = self._write_error or BrokenPipeError(32, "Broken pipe")
        self.changed()

    def _wait(self, what: str, deadline: float | None) -> None:
        self.watchers.append(current().current)  # type: ignore[arg-type]
        if not current().block(what, deadline):
            raise TimeoutError("timed out")

    def _check_open(self) -> None:
        if self.closed:
            raise OSError(9, "Bad file descriptor")

    def _deadline(self) -> float | None:
        return None if self.timeout is None else current().now + self.timeout

    # --- the stream ---------------------------------------------------------------------------------------

    def send(self, data: Any) -> int:
        current().pause("send")
        return self._write(bytes(data), self._deadline())

    def _write(self, data: bytes, deadline: float | None) -> int:
        self._check_open()
        while True:
            if self._write_error is not None:
                raise self._write_error
            if self._shut:
                raise BrokenPipeError(32, "Broken pipe")
            if (room := self._room()) > 0:
                break
            if self.timeout == 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._wait("send", deadline)
            self._check_open()
        data = data[:room]
        peer = self.peer
        assert peer is not None
        if peer.closed:
            self.reset_later()
            return len(data)
        rng = current().rng
        cut = rng.randrange(1, len(data)) if len(data) > 1 and rng.random() < _SPLIT else len(data)
        for part in filter(None, (data[:cut], data[cut:])):
            peer._under_way += len(part)
            _network_call(peer, lambda part=part: peer._arrive(part))
        return len(data)

    def sendall(self, data: Any) -> None:
        data = bytes(data)
        deadline = self._deadline()
        current().pause("sendall")
        while data:
            data = data[self._write(data, deadline) :]

    def _arrive(self, part: bytes) -> None:
        self._under_way -= len(part)
        if self.closed:
            if self.peer is not None:
                self.peer.reset_later()
            return
        self._arrived += part
        self.changed()

    def reset_later(self) -> None:
        _network_call(self, self.reset)

    def recv(self, size: int, flags: int = 0) -> bytes:
        scheduler = current()
        scheduler.pause("recv")
        deadline = self._deadline()
        whole = bool(flags & socket.MSG_WAITALL)
        while True:
            self._check_open()
            enough = len(self._arrived) >= (size if whole else 1)
            if enough or (self._arrived and (self._end or self._error or self._shut)):
                break
            if self._error is not None:
                error, self._error, self._end = self._error, None, True
                raise error
            if self._end or self._shut:
                return b""
            if self.timeout == 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._wait("recv", deadline)
        count = min(size, len(self._arrived))
        if not whole and count > 1 and scheduler.rng.random() < _SHORT:
            count = scheduler.rng.randrange(1, count)
        data = bytes(self._arrived[:count])
        del self._arrived[:count]
        if self.peer is not None:
            self.peer.changed()
        return data

    def shutdown(self, how: int) -> None:
        current().pause("shutdown")
        self._check_open()
        if self._write_error is not None and self._error is None and self._end:
            raise OSError(107, "Transport endpoint is not connected")
        self._shut = True
        if self.peer is not None:
            _network_call(self.peer, self.peer._hang_up)
        self.changed()

    def _hang_up(self) -> None:
        self._end = True
        self.changed()

    def close(self) -> None:
        if self.closed or current().closing:
            return
        self._close()
        current().pause("close")

    def _close(self) -> None:
        self.closed = True
        if self.backlog is not None:
            _network[0].listeners.pop(self.address, None)
            for caller in self.backlog:
                caller._close()
        elif self.peer is not None and not self.peer.closed:
            _network_call(self.peer, self.peer.reset if self._arrived else self.peer._hang_up)
        self.changed()

    def _closed_by_system(self) -> None:
        if not self.closed:
            self._close()

    # --- calls --------------------------------------------------------------------------------------------

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        current().pause("accept")
        deadline = self._deadline()
        while True:
            self._check_open()
            if self.backlog:
                caller = self.backlog.pop(0)
                caller.timeout = None
                return caller, caller.address
            if self.timeout == 0:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            self._wait("accept", deadline)

    def settimeout(self, value: float | None) -> None:
        self._check_open()
        self.timeout = value

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0)

    def setsockopt(self, *_: object) -> None:
        self._check_open()

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _network_call(to: Socket, action: Any) -> None:
    """Has something reach a socket, behind everything that was sent to it before."""
    scheduler = current()
    to._last = max(to._last, scheduler.now + _network[0].delay()) + 1e-9
    scheduler.call_at(to._last, action)


def _create_server(address: tuple[str, int], **_: object) -> Socket:
    current().pause("listen")
    s = Socket()
    s.address = (address[0], address[1] or next(_network[0].ports))
    s.backlog = []
    _network[0].listeners[s.address] = s
    return s


def _create_connection(address: tuple[str, int], timeout: float | None = None) -> Socket:
    scheduler, network = current(), _network[0]
    s = Socket()
    s.timeout = timeout
    scheduler.sleep(2 * network.delay(), "connect")
    listener = network.listeners.get((address[0], address[1]))
    if listener is None:
        s._close()
        raise ConnectionRefusedError(111, "Connection refused")
    other = Socket()
    other.process.at_end.remove(other._closed_by_system)
    other.process = listener.process
    other.process.at_end.append(other._closed_by_system)
    s.peer, other.peer = other, s
    s.address, other.address = ("127.0.0.1", next(network.ports)), listener.address
    network.connections.append((s, other))
    assert listener.backlog is not None
    listener.backlog.append(other)
    listener.changed()
    return s


def _socketpair() -> tuple[Socket, Socket]:
    one, other = Socket(), Socket()
    one.peer, other.peer = other, one
    return one, other


def _getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]


class Selector:
    """`selectors.DefaultSelector` and `PollSelector`."""

    def __init__(self) -> None:
        self._keys: dict[Socket, selectors.SelectorKey] = {}

    def register(self, s: Socket, events: int, data: Any = None) -> None:
        if s.closed:
            raise ValueError(f"Invalid file descriptor: {s.fileno()}")
        if s in self._keys:
            raise KeyError(f"{s!r} is already registered")
        self._keys[s] = selectors.SelectorKey(s, s.number, events, data)  # type: ignore[arg-type]

    def unregister(self, s: Socket) -> None:
        del self._keys[s]

    def modify(self, s: Socket, events: int, data: Any = None) -> None:
        self._keys[s] = selectors.SelectorKey(s, s.number, events, data)  # type: ignore[arg-type]

    def get_key(self, s: Socket) -> selectors.SelectorKey:
        return self._keys[s]

    def get_map(self) -> dict[Socket, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        scheduler = current()
        scheduler.pause("select")
        deadline = None if timeout is None else scheduler.now + timeout
        while True:
            if found := list(self._ready()):
                return found
            if deadline is not None and scheduler.now >= deadline:
                return []
            watched = list(self._keys)
            for s in watched:
                s.watchers.append(scheduler.current)  # type: ignore[arg-type]
            woken = scheduler.block("select", deadline)
            for s in watched:
                if scheduler.current in s.watchers:
                    s.watchers.remove(scheduler.current)
            if not woken:
                return list(self._ready())

    def _ready(self) -> Iterator[tuple[selectors.SelectorKey, int]]:
        for s, key in self._keys.items():
            if s.closed:
                continue
            events = selectors.EVENT_READ * s.readable() | selectors.EVENT_WRITE * s.writable()
            if events & key.events:
                yield key, events & key.events

    def close(self) -> None:
        self._keys.clear()

    def __enter__(self) -> Selector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


sim_selectors = Facade(selectors, DefaultSelector=Selector, PollSelector=Selector)
sim_socket = Facade(
    socket,
    create_server=_create_server,
    create_connection=_create_connection,
    socketpair=_socketpair,
    getaddrinfo=_getaddrinfo,
    socket=SimpleNamespace,
)
