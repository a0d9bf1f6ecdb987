"""What the tests of calls while an operation runs have in common."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.comms import inside
from tests.eventually import eventually
from tests.threads import results
from unicomm import CommError, Communicator, ReduceOp, new_comm
from unicomm.c10d.compat import HashStore

BACKENDS = [("shm", 2, None), ("gloo", 2, None), ("tcp", 2, None), ("auto", 3, {"hosts": "a,b,a"})]


def ranks(n: int, backend: str, hints: Any) -> list[Communicator]:
    """Returns the communicators of `n` ranks of this process."""
    store = HashStore()

    def make(rank: int) -> Communicator:
        return new_comm(backend, "cpu", name="f", store=store, rank=rank, size=n, timeout=20, hints=hints)

    return results([lambda r=r: make(r) for r in range(n)])


def until_on_fast_path(comm: Communicator) -> None:
    """Returns when a thread is within an operation of the native path."""
    eventually(lambda: inside.fast_path(comm).running())


def until_on_general_path(comm: Communicator) -> None:
    """Returns when a thread is within an operation of the general path."""
    eventually(lambda: inside.executor(comm).running is not None)


def finalize_in_a_signal_handler(comm: Communicator, until_running: Callable[[Communicator], None]) -> str:
    """Calls `finalize`, then `abort`, in a handler that interrupts an all_reduce of the main thread.

    The all_reduce has to raise a `CommError`, and `finalize` a `NotReadyError`, whose text is returned.
    """
    raised: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            comm.finalize()
        except BaseException as error:
            raised.append(error)
        comm.abort()

    def interrupts() -> None:
        until_running(comm)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=interrupts)
    try:
        thread.start()
        with pytest.raises(CommError):
            comm.all_reduce(torch.ones(5), ReduceOp.SUM)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert [type(error).__name__ for error in raised] == ["NotReadyError"]
    return str(raised[0])
