"""Ranks connect, and hosts are cut off meanwhile: nothing comes back then, no refusal either."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from unicomm.backends.out_of_band import connect_all
from unicomm.comms.errors import BackendError, PeerLostError

pytestmark = pytest.mark.timeout(150)
_TIMEOUT = 60.0  # seconds of the creation


@contextlib.contextmanager
def silent_address() -> Iterator[tuple[str, int]]:
    """An address that does not answer calls, as that of a host without a link: its queue is full."""
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            caller = closing.enter_context(socket.socket())
            caller.settimeout(0.3)
            try:
                caller.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()


class Meeting:
    """The rendezvous of rank 1 of 2, whose `check` raises from the third call on."""

    rank, size, labels, uid = 1, 2, (0, 1), "0" * 16

    def __init__(self, address: tuple[str, int], timeout: float = _TIMEOUT) -> None:
        self._address, self._end = address, time.monotonic() + timeout
        self.checks = 0

    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        other = {"address": self._address, "secret": "00" * 16, "trouble": ""}
        return [json.dumps(other).encode(), value]

    def check(self) -> None:
        self.checks += 1
        if self.checks >= 3:
            raise PeerLostError("rank 0 is gone", culprits=[0])


def _connect(meeting: Meeting) -> Any:
    setup: Any = SimpleNamespace(rendezvous=meeting, name="c", hints={})
    return connect_all(setup, "127.0.0.1", 1, "test")


def test_who_calls_a_silent_host_hears_that_it_is_gone():
    with silent_address() as address:
        meeting = Meeting(address)
        with pytest.raises(PeerLostError, match="rank 0 is gone"):
            _connect(meeting)
    assert meeting.checks == 3
    assert meeting.remaining() > _TIMEOUT / 2


def test_a_silent_host_is_named_at_the_deadline():
    with silent_address() as address:
        meeting = Meeting(address, timeout=3.0)
        meeting.check = lambda: None
        with pytest.raises(BackendError, match="cannot reach rank 0") as raised:
            _connect(meeting)
    assert raised.value.culprits == (0,)
