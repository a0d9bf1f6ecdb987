"""The thread of a process in which all of its watches hear and look."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fault_channel import Watch

FOREVER = 1e12
_NAP = 3600.0  # seconds that the thread sleeps at most; poll takes no more than some weeks


class Monitor:
    """The thread, and what it watches. It runs while there is a communicator to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._until = FOREVER  # when the thread looks again by itself

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches = [*self._watches, watch]
            if self._thread is None:
                self._wake = socket.socketpair()
                for s in self._wake:
                    s.setblocking(False)
                self._thread = threading.Thread(target=self._loop, name="unicomm-watch", daemon=True)
                self._thread.start()
            self._ring()

    def due(self, deadline: float) -> None:
        """Something has to be looked at then."""
        if deadline < self._until:
            self._until = deadline
            with self._lock:
                self._ring()

    def look(self) -> None:
        """Something that is due may have another time now."""
        with self._lock:
            self._ring()

    def remove(self, watch: Watch) -> None:
        """Returns when the watch's sockets are closed."""
        last = None
        with self._lock:
            self._watches = [w for w in self._watches if w is not watch]
            if not self._watches:
                last, self._thread = self._thread, None
            self._ring()
        if last is not None and last is not threading.current_thread():
            last.join(5.0)
        for s in watch._sockets.values():
            s.close()

    def _ring(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # full: it is awake in any case
                self._wake[1].send(b"!")

    def _loop(self) -> None:
        me = threading.current_thread()
        assert self._wake is not None
        wake = self._wake
        try:
            while self._thread is me:
                self._until = FOREVER
                watches = self._watches
                self._until = min([w.next_time() for w in watches] + [self._until])
                self._look(wake[0], watches)
        finally:
            for s in wake:
                s.close()

    def _look(self, wake: socket.socket, watches: list[Watch]) -> None:
        # poll has no state in the kernel that a forked child could spoil.
        with selectors.PollSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for watch in watches:
                for peer, s in watch.sockets():
                    with contextlib.suppress(ValueError):  # closed meanwhile
                        selector.register(s, selectors.EVENT_READ, (watch, peer))
            for key, _ in selector.select(min(max(0.0, self._until - time.monotonic()), _NAP)):
                if key.data is None:
                    with contextlib.suppress(OSError):
                        wake.recv(4096)
                else:
                    watch, peer = key.data
                    watch.readable(peer)
        now = time.monotonic()
        for watch in watches:
            watch.on_time(now)


current = Monitor()


def _forget_after_fork() -> None:
    global current
    for s in current._wake or ():
        s.close()
    current = Monitor()  # the parent's thread is not here


os.register_at_fork(after_in_child=_forget_after_fork)
