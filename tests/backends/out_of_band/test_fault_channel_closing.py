"""A rank leaves while the thread of its fault channel reads."""

from __future__ import annotations

import socket
import threading

import pytest

from unicomm.backends.out_of_band.fault_channel import FaultChannel

pytestmark = pytest.mark.timeout(60)


class Probe:
    """A connection that is closed, or nearly, in the middle of being read."""

    def __init__(self, real: socket.socket) -> None:
        self.real = real
        self.close_it: threading.Thread | None = None
        self.read = threading.Event()
        self.open_when_read = False

    def recv(self, count: int) -> bytes:
        assert self.close_it is not None
        self.close_it.start()
        self.close_it.join(0.2)  # time for a close that does not wait for this; one that does gets none
        self.open_when_read = self.real.fileno() >= 0
        self.read.set()
        return b""

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_a_connection_that_is_read_is_not_closed_meanwhile():
    """Else its number may be a new communicator's, whose first bytes the old one's thread would read."""
    kept, (mine, theirs) = socket.socketpair(), socket.socketpair()
    other = FaultChannel({1: kept[0]}, 0, lambda: None)  # of the parent: the thread goes on
    probe = Probe(mine)
    channel = FaultChannel({1: probe}, 0, lambda: None)  # type: ignore[dict-item]
    probe.close_it = threading.Thread(target=channel.close)
    theirs.send(b"!")
    assert probe.read.wait(30)
    probe.close_it.join(30)
    assert probe.open_when_read
    assert mine.fileno() < 0  # and closed it is
    assert theirs.recv(4096)  # with a farewell
    other.close()
    for s in (kept[1], theirs):
        s.close()
