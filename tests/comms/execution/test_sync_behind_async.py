"""Synchronous operations that run behind pending ones, in the worker's thread."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.eventually import eventually
from unicomm import AbortedError, Communicator, ReduceOp
from unicomm.comms.execution.host import HostExecutor
from unicomm.testing import run_ranks


@pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])
def test_an_error_is_raised_also_if_the_worker_is_faster_than_the_caller(backend, monkeypatch):
    """The operation had failed before its caller began to wait. Its tensors are as they were."""
    settle, issued = HostExecutor.settle, threading.Event()

    def settle_late(executor, op, work):
        if op.name == "all_reduce":
            issued.set()
            eventually(lambda: not work._pending)
        settle(executor, op, work)

    monkeypatch.setattr(HostExecutor, "settle", settle_late)

    def program(comm: Communicator) -> None:
        comm.barrier()
        if comm.get_rank() == 1:
            assert issued.wait(20)
            comm.abort()
            return
        pending = comm.barrier(async_op=True)
        with pytest.raises(AbortedError):
            comm.all_reduce(torch.ones(5), ReduceOp.SUM)
        with pytest.raises(AbortedError):
            pending.wait()

    run_ranks(program, 2, backend=backend, timeout=30)
