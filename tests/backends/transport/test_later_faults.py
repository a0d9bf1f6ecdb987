"""A fault that a rank finds after a collective does not fail the ranks that are still in it."""

import threading

import pytest
import torch

from unicomm import AbortedError, ReduceOp
from unicomm.testing import run_ranks


@pytest.fixture(params=["in one native call", "on the general path"])
def all_reduce(request):
    """`all_reduce(comm, tensor)`, which looks for faults before it writes an output."""

    def run(comm, x):
        if request.param == "on the general path":
            comm.all_reduce(x, ReduceOp.SUM, async_op=True).wait()
        else:
            comm.unsafe_backend.supervisor.native.moment = 0.0
            comm.all_reduce(x, ReduceOp.SUM, async_op=False)

    return run


def abort(comm, raised):
    """Rank 0 aborts, and all ranks hear of it in their next operation."""
    if comm.get_rank() == 0:
        comm.abort()
    error = raised(comm.barrier, async_op=False)
    assert type(error) is AbortedError
    assert error.culprits == (0,)


def test_an_abort_after_a_collective(backend, eventually, raised, all_reduce):
    def program(comm):
        channel, x = comm.unsafe_backend.channel, torch.ones(3)
        looks = 0

        def look():
            nonlocal looks
            looks += 1
            eventually(lambda: channel.fault is not None)

        if comm.get_rank() == 1:
            # Has all data of the first collective, and looks for faults only when there is one.
            channel.catch_up = look
        all_reduce(comm, x)
        assert x.tolist() == [2.0] * 3
        assert looks == comm.get_rank()
        abort(comm, raised)

    run_ranks(program, 2, backend=backend, timeout=60)


def test_an_abort_within_a_collective(backend, eventually, raised, all_reduce):
    def program(comm):
        channel = comm.unsafe_backend.channel
        if comm.get_rank() == 1:
            channel.catch_up = lambda: eventually(lambda: channel.fault is not None)
        else:
            channel.catch_up = comm.abort  # it has given its data, and got the other's
        assert type(raised(all_reduce, comm, torch.ones(3))) is AbortedError

    run_ranks(program, 2, backend=backend, timeout=60)


def test_an_abort_while_supervision_begins(backend, eventually, raised):
    asked = threading.Event()

    def program(comm):
        supervisor, channel, x = comm.unsafe_backend.supervisor, comm.unsafe_backend.channel, torch.ones(3)
        begin = supervisor.begin

        def begins(deadline):
            asked.set()
            eventually(lambda: channel.fault is not None)
            return begin(deadline)

        if comm.get_rank() == 1:
            supervisor.begin, supervisor.native.moment = begins, 0.0
        else:
            # The other rank has given its data, and gets this rank's and the abort before it waits again.
            assert asked.wait(60)
        comm.all_reduce(x, ReduceOp.SUM, async_op=False)
        assert x.tolist() == [2.0] * 3
        abort(comm, raised)

    run_ranks(program, 2, backend=backend, timeout=60)
