"""The thread of a process that serves all its fault channels."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from typing import Protocol

from unicomm.comms.failures.thread_start import start

FOREVER = 1e12
_NAP = 3600.0  # seconds that the thread sleeps at most; poll takes no more than some weeks


class Served(Protocol):
    """A fault channel, as the thread sees it."""

    def next_time(self) -> float:
        """Returns when `on_time` has to be called at the latest."""

    def sockets(self) -> list[tuple[int, socket.socket]]:
        """Returns the connections to read from, by peer."""

    def readable(self, peer: int) -> None:
        """Reads what has come from a peer."""

    def on_time(self, now: float) -> None:
        """Acts on what has been read and on the time."""

    def close_sockets(self) -> None:
        """Closes the connections."""


class ChannelThread:
    """The thread, and the fault channels that it serves. It runs while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: list[Served] = []
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._until = FOREVER  # when the thread looks again by itself

    def add(self, channel: Served) -> None:
        with self._lock:
            self._channels = [*self._channels, channel]
            if self._thread is None:
                self._wake = socket.socketpair()
                for s in self._wake:
                    s.setblocking(False)
                self._thread = threading.Thread(target=self._loop, name="unicomm-faults", daemon=True)
                try:
                    start(self._thread)  # which runs as long as it is `_thread`: set before
                except BaseException:
                    self._thread = None
                    raise
            self._ring()

    def due(self, deadline: float) -> None:
        """A channel has to act at that time."""
        if deadline < self._until:
            self._until = deadline
            with self._lock:
                self._ring()

    def look(self) -> None:
        """A channel's next time may have changed."""
        with self._lock:
            self._ring()

    def remove(self, channel: Served) -> None:
        """Returns when the channel's sockets are closed."""
        last = None
        with self._lock:
            self._channels = [c for c in self._channels if c is not channel]
            if not self._channels:
                last, self._thread = self._thread, None
            self._ring()
        if last is not None and last is not threading.current_thread():
            last.join(5.0)
        channel.close_sockets()

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
                channels = self._channels
                self._until = min([c.next_time() for c in channels] + [self._until])
                self._look(wake[0], channels)
        finally:
            for s in wake:
                s.close()

    def _look(self, wake: socket.socket, channels: list[Served]) -> None:
        # poll has no state in the kernel that a forked child could spoil.
        with selectors.PollSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            for channel in channels:
                for peer, s in channel.sockets():
                    with contextlib.suppress(ValueError):  # closed meanwhile
                        selector.register(s, selectors.EVENT_READ, (channel, peer))
            # Before the look: if this process is stopped meanwhile, what came in that time is read before
            # any channel concludes that it did not come.
            now = time.monotonic()
            for key, _ in selector.select(min(max(0.0, self._until - now), _NAP)):
                if key.data is None:
                    with contextlib.suppress(OSError):
                        wake.recv(4096)
                else:
                    channel, peer = key.data
                    channel.readable(peer)
        for channel in channels:
            channel.on_time(now)


current = ChannelThread()


def _forget_after_fork() -> None:
    global current
    for s in current._wake or ():
        s.close()
    current = ChannelThread()  # the parent's thread is not here


os.register_at_fork(after_in_child=_forget_after_fork)
