"""torch's option objects read where they lie: the same answers as by their getters, or none at all."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from unicomm import Communicator, new_comm
from unicomm.c10d import torch_options
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

NUMBERS = {"SUM": 6.0, "PRODUCT": 8.0, "MIN": 2.0, "MAX": 4.0, "AVG": 3.0}


def options(op, later=False, timeout=None):
    opts = dist.AllreduceOptions()
    opts.reduceOp = op
    opts.asyncOp = later
    if timeout is not None:
        opts.timeout = timeout
    return opts


def test_this_torch_is_understood():
    assert torch_options.layout() is not None


@pytest.mark.parametrize("understood", [True, False])
def test_every_reduction_timeout_and_mode(understood, monkeypatch, raised):
    def program(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        if not understood:
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
        group.allreduce([x, bits], options(dist.ReduceOp.SUM)).wait()
        assert (x.tolist(), bits.item()) == ([6.0] * 3, 6)

    run_ranks(program, 2)


def test_synchronous_and_plain_is_the_fast_path():
    with new_comm("shm", torch.device("cpu")) as comm:
        fast, x = comm._engine.fast, torch.ones(3)
        assert fast.all_reduce_with([x], options(dist.ReduceOp.SUM)) is True
        for no in (
            options(dist.ReduceOp.SUM, True),
            options(dist.ReduceOp.SUM, False, timedelta(seconds=1)),
            options(dist._make_nccl_premul_sum(0.5)),
            dist.BroadcastOptions(),
            dist.AllreduceCoalescedOptions(),
            None,
        ):
            assert fast.all_reduce_with([x], no) is False
        assert fast.all_reduce_with([x, x], options(dist.ReduceOp.SUM)) is False
        assert fast.all_reduce_with((x,), options(dist.ReduceOp.SUM)) is False


@pytest.mark.parametrize(
    "seen",
    [
        lambda look, options: None,  # nothing to read there
        lambda look, options: bytes(56),  # nothing changes
        lambda look, options: look(options)[:24] * 3,  # everything in several places
        lambda look, options: look(options)[:32] + bytes(24),  # the timeout is not there
    ],
)
def test_what_looks_different_is_left_alone(seen, monkeypatch):
    look = torch_options._look
    monkeypatch.setattr(torch_options, "_look", lambda options: seen(look, options))
    assert torch_options.layout() is None
    assert not torch_options.learn({})
