"""Requests to a store in a thread of their own, so that a store that does not answer holds no caller.

A TCPStore waits for each answer in C++, for ever if the host of the store is stopped, and cannot be
interrupted. It serves one request at a time. So each store has one thread while it has requests. The caller
waits for the thread until its own deadline; then it leaves the request behind, and the thread with it.

A thread that returns from C++ to an interpreter that is ending aborts the process. When the process ends, the
connections of stores that have not answered are therefore shut down, which ends the requests.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from unicomm.c10d.compat import FileStore, HashStore, Store, TCPStore, base_store

from .daemon_pool import DaemonPool, call_within
from .process_sockets import internet_sockets, plain_address

T = TypeVar("T")

_SILENT = 2.0  # seconds without an answer after which a store may be gone
_LOOK = 0.2  # seconds between two looks at who is gone
_LAST = 2.0  # seconds for the end of requests when the process ends
_RESOLVED = 1.0  # seconds for the addresses of a store's host when the process ends
THREAD = "unicomm-store"  # the name of the threads that run requests
_pool = DaemonPool(THREAD)


class NoAnswerError(Exception):
    """The store has not answered in time."""


@dataclass(frozen=True)
class StoreHost:
    """The process that holds a store.

    Attributes:
        words: how errors call it.
        rank: its number in the job; None if it is no rank, or unknown.
    """

    words: str
    rank: int | None = None


@dataclass(eq=False)
class Opening:
    """A TCPStore that is being opened, as the object of a request."""

    host: str
    port: int


@dataclass(eq=False)
class Request:
    """A request, which a thread answers: it frees `answered` when `result` or `error` is there."""

    job: Callable[[], Any]
    base: Any  # the store, whose object has to stay the same one as long as the request is under way
    answered: threading.Lock = field(default_factory=threading.Lock)
    result: Any = None
    error: BaseException | None = None
    abandoned: bool = False


class StoreRequests:
    """The requests of this process to one store, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._served = False  # whether a thread serves the requests

    @property
    def silent(self) -> bool:
        """Whether the store has not yet answered a request that its caller has left behind."""
        current = self._current
        return current is not None and current.abandoned

    def ask(
        self, base: Any, seconds: float, job: Callable[[], T], check: Callable[[], None] | None = None
    ) -> T:
        """Returns or raises what `job` does; raises `NoAnswerError` after `seconds`.

        `check` is called several times a second once the store seems to be gone; what it raises ends the
        wait.
        """
        request = self.begin(base, job)
        try:
            done = self._await(request, max(0.0, min(seconds, threading.TIMEOUT_MAX)), check)
        except BaseException:  # such as Ctrl-C
            self.leave(request)
            raise
        if not done and not self.leave(request):
            raise NoAnswerError
        if request.error is not None:
            try:
                raise request.error
            finally:
                del request  # this frame is in the traceback
        result: T = request.result
        return result

    def begin(self, base: Any, job: Callable[[], Any]) -> Request:
        """Has `job` done and does not wait. Whoever gives the answer up calls `leave`."""
        if _ending:
            raise NoAnswerError("this process ends")
        request = Request(job, base)
        request.answered.acquire()
        with self._lock:
            self._waiting.append(request)
            start, self._served = not self._served, True
        if start:
            try:
                _pool.run(self._serve)
            except (OSError, RuntimeError):  # no memory for a thread; others have to hear of it by the store
                self._serve()
        return request

    def _await(self, request: Request, seconds: float, check: Callable[[], None] | None) -> bool:
        """Waits for the answer; returns whether it has come within `seconds`."""
        if check is None:
            return request.answered.acquire(timeout=seconds)
        # A rank that `check` finds to be gone may just have left after a success, of which the answer tells.
        patience = _LOOK if self.silent else _SILENT
        end = time.monotonic() + seconds
        while not request.answered.acquire(timeout=min(patience, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
            check()
            patience = _LOOK
        return True

    def leave(self, request: Request) -> bool:
        """Leaves a request behind, unless it has just been answered. Returns whether it has."""
        with self._lock:
            request.abandoned = True
            if request in self._waiting:
                self._waiting.remove(request)
            return request.answered.acquire(blocking=False)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._served, self._current = False, None
                    self._idle.notify_all()
                    return
                request = self._current = self._waiting.popleft()
            try:
                request.result = request.job()
            except BaseException as error:
                request.error = error
            with self._lock:
                self._current = None
                request.answered.release()
            del request

    def end(self, seconds: float) -> None:
        """Waits for the request under way; then ends the connection that it waits for."""
        with self._lock:
            self._waiting.clear()
            current = self._current
            if current is None or (not current.abandoned and self._idle.wait_for(self._is_idle, seconds / 2)):
                return
        if isinstance(current.base, (TCPStore, Opening)):
            shut_connections(current.base.host, current.base.port)
        elif callable(close := getattr(current.base, "close", None)):  # one of unicomm's own
            close()
        with self._lock:
            self._idle.wait_for(self._is_idle, seconds / 2)

    def _is_idle(self) -> bool:
        return self._current is None


_requests: weakref.WeakKeyDictionary[Any, StoreRequests] = weakref.WeakKeyDictionary()
_hosts: weakref.WeakKeyDictionary[Any, StoreHost] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_ending = False


def requests_of(base: Any) -> StoreRequests | None:
    """The requests to a store below all prefixes. None for a store whose requests never wait."""
    if isinstance(base, HashStore):
        return None
    with _lock:
        return _requests.setdefault(base, StoreRequests())


def set_host(store: Store, host: StoreHost, replace: bool = False) -> None:
    """Says which process holds a store. The first word counts, except with `replace`."""
    base = base_store(store)
    with _lock:
        _hosts[base] = host if replace else _hosts.get(base, host)


def host_of(store: Any) -> StoreHost:
    """The process that holds a store, as far as it is known."""
    base = base_store(store)
    with _lock:
        found = _hosts.get(base)
    if found is not None:
        return found
    if isinstance(base, TCPStore):
        return host_at(base.host, base.port)
    if isinstance(base, FileStore):
        return StoreHost(f"the processes that use the store's file {getattr(base, 'path', '')}")
    return StoreHost("the process that holds the store (rank 0 at MASTER_ADDR, or the launcher)")


def host_at(host: str, port: int) -> StoreHost:
    """The process that holds the TCPStore at an address: rank 0, if that is MASTER_ADDR, or torchrun."""
    words, environ = f"the process that holds the store at {host}:{port}", os.environ
    if (environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")) != (host, str(port)):
        return StoreHost(words)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return StoreHost(f"torchrun, which holds the store at {host}:{port}")
    return StoreHost(f"rank 0, which holds the store at {host}:{port}", 0)


def serves(base: Any) -> bool:
    """Whether this process holds a TCPStore of which that is unknown: it listens at the store's port."""
    if not isinstance(base, TCPStore) or host_of(base).rank is not None:
        return False
    port = base.port
    for s in internet_sockets():
        with contextlib.suppress(OSError):
            if s.getsockname()[1] == port and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return True
    return False


def connections(host: str, port: int, act: Callable[[socket.socket], None]) -> None:
    """Calls `act` with each connection of this process to a server."""
    if not host or not port:
        return
    try:
        known = {plain_address(f[4][0]) for f in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return
    for s in internet_sockets():
        with contextlib.suppress(OSError):  # it is not connected, or not any more
            there = s.getpeername()
            if there[1] == port and plain_address(there[0]) in known:
                act(s)


def shut_connections(host: str, port: int) -> None:
    """Ends the connections of this process to a server: C++ that waits for an answer there returns."""

    def shut(s: socket.socket) -> None:
        s.shutdown(socket.SHUT_RDWR)

    with contextlib.suppress(TimeoutError):
        call_within(_RESOLVED, "unicomm-store-end", lambda: connections(host, port, shut))


def _forget() -> None:
    """In a forked child, which has none of the threads."""
    global _lock
    _lock = threading.Lock()
    _requests.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _at_exit() -> None:
    global _ending
    _ending = True
    end = time.monotonic() + _LAST
    with _lock:
        every = list(_requests.values())
    for requests in every:
        requests.end(max(0.1, end - time.monotonic()))
