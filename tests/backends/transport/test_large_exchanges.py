"""Collectives whose data do not fit into slots, and are sent from tensor to tensor."""

import gc
import weakref

import pytest
import torch

import unicomm
from unicomm.testing import run_ranks

RANKS = 3
#: Elements of a part: the most that travels in a slot (128 KiB), one more, and far more.
COUNTS = [1 << 15, (1 << 15) + 1, 1 << 19]
SUM = unicomm.ReduceOp.SUM


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("hints", [{}, {"hosts": "a,b,b"}, {"hosts": "b,a,b"}])
def test_every_part_arrives(async_op, hints):
    backend = "auto" if hints else "tcp"

    def program(comm):
        me = comm.get_rank()
        for count in COUNTS:
            parts = torch.arange(RANKS * count, dtype=torch.float32) + me * 0.5
            got, everyone = torch.zeros(RANKS * count), torch.zeros(RANKS * count)
            works = [
                comm.all_to_all_single(got, parts, async_op),
                comm.all_gather_single(everyone, parts[:count], async_op),
            ]
            for work in works:
                work.wait()
            for r, (part, whole) in enumerate(zip(got.chunk(RANKS), everyone.chunk(RANKS), strict=True)):
                first = torch.arange(count, dtype=torch.float32) + r * 0.5
                assert torch.equal(part, first + me * count)
                assert torch.equal(whole, first)

    run_ranks(program, RANKS, backend=backend, hints=hints)


@pytest.mark.parametrize("count", [*COUNTS[:2], 1 << 18, (1 << 18) + 1])  # 1 MiB is the most in one step
@pytest.mark.parametrize("hints", [{}, {"hosts": "a,b"}])
def test_two_ranks(count, hints):
    def program(comm):
        me = comm.get_rank()
        ramp = torch.arange(2 * count, dtype=torch.float32)
        both = 2 * ramp + 1.0  # the sum of the ranks' values
        reduced = ramp + me
        comm.all_reduce(reduced, SUM, False)
        assert torch.equal(reduced, both)
        for root in range(2):
            sent = ramp + me
            comm.broadcast(sent, root, False)
            assert torch.equal(sent, ramp + root)
        parts, apart = ramp + me, torch.zeros(count)
        for part in (apart, parts.chunk(2)[me]):
            comm.reduce_scatter_single(part, parts, SUM, False)
            assert torch.equal(part, both.chunk(2)[me])

    run_ranks(program, 2, backend="auto" if hints else "tcp", hints=hints)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("hints", [{}, {"hosts": "a,b,b"}])
def test_tensors_are_let_go(async_op, hints):
    def program(comm):
        got, parts = torch.zeros(RANKS * COUNTS[-1]), torch.zeros(RANKS * COUNTS[-1])
        comm.all_to_all_single(got, parts, async_op).wait()
        return weakref.ref(got), weakref.ref(parts), comm

    told = run_ranks(program, RANKS, backend="auto" if hints else "tcp", hints=hints)
    gc.collect()
    assert [(got(), parts()) for got, parts, _ in told] == [(None, None)] * RANKS


@pytest.mark.parametrize("backend", ["tcp", "ucx"])
@pytest.mark.parametrize(("given", "expected"), [(50_000, 25_000), (25_000, 50_000), (1 << 21, 1 << 20)])
def test_a_broadcast_of_other_sizes_where_calls_are_not_compared(backend, given, expected):
    """No rank takes a part of it for all."""

    def program(comm):
        x = torch.full((given if comm.get_rank() == 0 else expected,), float(comm.get_rank()))
        comm.broadcast(x, 0, False)
        comm.barrier(False)
        raise AssertionError(f"rank {comm.get_rank()} has {x.unique().tolist()}")

    with pytest.raises(unicomm.CommError):
        run_ranks(program, 3, backend=backend, timeout=2, hints={"check_mismatch": False})
