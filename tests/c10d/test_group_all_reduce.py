"""A process group's `allreduce` with torch's options: by the native fast path and by the general path."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from unicomm import Communicator, MismatchError, new_comm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.c10d.process_group_work import DONE
from unicomm.testing import run_ranks

NUMBERS = {"SUM": 6.0, "PRODUCT": 8.0, "MIN": 2.0, "MAX": 4.0, "AVG": 3.0}


def options(op, later=False, timeout=None):
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    opts.asyncOp = later
    if timeout is not None:
        opts.timeout = timeout
    return opts


@pytest.mark.parametrize("fast", [True, False])
def test_every_reduction_timeout_and_mode(fast):
    def program(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        if not fast:
            comm._engine.fast.block()
        for later in (False, True):
            for timeout in (None, timedelta(seconds=20)):
                for name, result in NUMBERS.items():
                    x = torch.full((3,), 2.0 + 2 * comm.get_rank())
                    work = group.allreduce([x], options(getattr(dist.ReduceOp, name), later, timeout))
                    work.wait()
                    assert x.tolist() == [result] * 3, (later, timeout, name)
        x = torch.full((3,), 2.0 + 2 * comm.get_rank())
        group.allreduce([x], options(dist._make_nccl_premul_sum(0.5))).wait()
        assert x.tolist() == [3.0] * 3
        bits = torch.tensor([1 + comm.get_rank()])
        group.allreduce([bits], options(dist.ReduceOp.BOR)).wait()
        assert bits.item() == 3
        group.allreduce_coalesced([x, bits], options(dist.ReduceOp.SUM)).wait()
        assert (x.tolist(), bits.item()) == ([6.0] * 3, 6)

    run_ranks(program, 2)


def test_the_fast_path_takes_plain_synchronous_calls():
    with new_comm("shm", torch.device("cpu")) as comm:
        group, x = UnicommProcessGroup(comm), torch.ones(3)
        assert group.allreduce([x], options(dist.ReduceOp.SUM)) is DONE
        assert comm._engine.fast.seq == 1
        assert group.allreduce.__name__ == "allreduce"
        for general in (
            options(dist.ReduceOp.SUM, True),
            options(dist.ReduceOp.SUM, False, timedelta(seconds=1)),
            options(dist._make_nccl_premul_sum(0.5)),
            dist.AllreduceCoalescedOptions(),
            None,
        ):
            assert group.allreduce([x], general) is not DONE
        assert group.allreduce_coalesced([x, x], options(dist.ReduceOp.SUM)) is not DONE
        assert group.allreduce((x,), options(dist.ReduceOp.SUM)) is not DONE
        assert group.allreduce(tensors=[x], opts=options(dist.ReduceOp.SUM)) is not DONE
        assert group.allreduce(x, dist.ReduceOp(dist.ReduceOp.SUM)) is not DONE
        assert x.tolist() == [0.5] * 3  # by the premultiplied sum


def test_torchs_function_with_every_reduction_in_any_order():
    """Options that were set by hand in between, on two threads, leave nothing behind for the next call."""

    def program(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        calls = [(name, form, later) for name in NUMBERS for form in range(3) for later in (False, True)]
        for name, form, later in random.Random(7).sample(calls * 3, 3 * len(calls)):
            x = torch.full((3,), 2.0 + 2 * comm.get_rank())
            op = getattr(dist.ReduceOp, name)
            options(dist.ReduceOp.MIN if name == "MAX" else dist.ReduceOp.MAX)
            if form == 2:
                work = group.allreduce([x], options(op, later))
            else:
                work = dist.all_reduce(x, dist.ReduceOp(op) if form else op, group, later)
            assert (work is None) == (form < 2 and not later)
            if work is not None:
                work.wait()
            assert x.tolist() == [NUMBERS[name]] * 3, (name, form, later)

    run_ranks(program, 2)


def test_options_can_be_read_and_set_as_before(raised):
    opts = options(dist.ReduceOp.MAX, True)
    assert (opts.reduceOp, opts.asyncOp) == (dist.ReduceOp.MAX, True)
    assert type(raised(setattr, opts, "reduceOp", "MAX")) is TypeError
    assert type(raised(delattr, opts, "asyncOp")) is AttributeError
    assert opts.reduceOp == dist.ReduceOp.MAX
    assert callable(dist.AllreduceOptions.reduceOp.fget)


def test_an_error_of_the_fast_path(raised):
    def program(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        x = torch.ones(3 + comm.get_rank())
        error = raised(group.allreduce, [x], options(dist.ReduceOp.SUM))
        assert type(error) is MismatchError
        assert error.op == "all_reduce"

    run_ranks(program, 2)


def test_a_group_outlives_its_communicator(raised):
    comm = new_comm("shm", torch.device("cpu"))
    group = UnicommProcessGroup(comm)
    comm.finalize()
    assert "finalized" in str(raised(group.allreduce, [torch.ones(3)], options(dist.ReduceOp.SUM)))
