"""Signals that come as a Work begins to wait, before Python's wait for a lock would notice them."""

import ctypes
import operator
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from unicomm import CommTimeoutError, Work

_raise_signal = ctypes.CDLL(None)["raise"]  # unlike the signal module's, without a look at signals


class SignalledLock:
    """A lock before whose first wait a signal comes, with no bytecode between the two."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release
        self._before: Callable[[], object] = partial(_raise_signal, signal.SIGUSR1)

    def acquire(self, timeout: float = -1) -> bool:
        before, self._before = self._before, int
        return list(map(operator.call, (before, partial(self._lock.acquire, timeout=timeout))))[1]


@pytest.fixture
def work():
    """One that gets a signal as somebody waits for it, and fails after 20 s unless it has ended by then."""
    work = Work("all_reduce", 1, True)
    assert work._lock is not None
    work._lock = SignalledLock(work._lock)
    handler = signal.getsignal(signal.SIGUSR1)
    late = threading.Timer(20, work._finish, [RuntimeError("nobody has ended it")])
    late.start()
    yield work
    late.cancel()
    signal.signal(signal.SIGUSR1, handler)


def test_handler_runs(work):
    """Here it is the handler that ends the work."""
    signal.signal(signal.SIGUSR1, lambda *_: work._finish(None))
    work.wait()


@pytest.mark.parametrize("limit", [None, 60])
def test_interrupt_ends_the_wait(work, limit):
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        work.wait(limit)
    assert not work.is_completed()


def test_limit_holds(work):
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with pytest.raises(CommTimeoutError, match=r"0\.3 s"):
        work.wait(0.3)
