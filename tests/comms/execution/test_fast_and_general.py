"""Some ranks may run a small operation in one native call, the others on the general path."""

import random

import pytest
import torch

from tests.comms import inside
from tests.ucx_here import needs_ucx
from unicomm import MismatchError, ReduceOp
from unicomm.comms.execution.engine import Engine
from unicomm.testing import run_ranks

SIZE = 4
PLACES = {name: (name, {}) for name in ("tcp", "ucx")} | {
    layout: ("auto", {"hosts": layout}) for layout in ("a,a,b,b", "a,b,b,c")
}
COLLECTIVES = ("all_reduce", "broadcast", "barrier", "all_gather_single", "reduce_scatter_single")
OPERATIONS = (*COLLECTIVES, "all_to_all_single", "message")
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16)
REDUCTIONS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)


@pytest.fixture(params=[pytest.param(p, marks=needs_ucx) if p == "ucx" else p for p in PLACES])
def place(request):
    backend, hints = PLACES[request.param]
    return {"backend": backend, "hints": hints, "timeout": 60}


def values(seed, rank, numel, dtype):
    """Small whole numbers, so that sums are exact in every type and order."""
    source = random.Random(f"{seed} {rank}")
    return torch.tensor([source.randrange(4) for _ in range(numel)], dtype=dtype)


def reduced(parts, op):
    stacked = torch.stack(parts)
    if op is ReduceOp.MAX:
        return stacked.amax(0)
    if op is ReduceOp.MIN:
        return stacked.amin(0)
    total = stacked.sum(0, dtype=parts[0].dtype)
    if op is ReduceOp.AVG:
        floats = parts[0].dtype.is_floating_point
        return total / len(parts) if floats else torch.div(total, len(parts), rounding_mode="trunc")
    return total


def run_one(comm, seed, general):
    """Runs the operation that follows from the seed; `general`: whether this rank takes the general path."""
    choose, rank = random.Random(seed), comm.get_rank()
    name, dtype, op = choose.choice(OPERATIONS), choose.choice(DTYPES), choose.choice(REDUCTIONS)
    most = choose.choice((1, 16, 600, 30_000))
    numel, root, source = choose.randrange(most), choose.randrange(SIZE), choose.randrange(SIZE)
    target = (source + choose.randrange(1, SIZE)) % SIZE
    everyone = [values(seed, r, numel * SIZE, dtype) for r in range(SIZE)]
    mine, out = everyone[rank], torch.full((numel,), 77, dtype=dtype)

    def finish(call, *arguments):
        work = call(*arguments, async_op=general)
        if general:
            work.wait()

    if name == "all_reduce":
        out.copy_(mine[:numel])
        finish(comm.all_reduce, out, op)
        expected = reduced([x[:numel] for x in everyone], op)
    elif name == "broadcast":
        out.copy_(mine[:numel])
        finish(comm.broadcast, out, root)
        expected = everyone[root][:numel]
    elif name == "barrier":
        finish(comm.barrier)
        expected = out.clone()
    elif name == "all_gather_single":
        out = torch.full((numel * SIZE,), 77, dtype=dtype)
        finish(comm.all_gather_single, out, mine[:numel])
        expected = torch.cat([x[:numel] for x in everyone])
    elif name == "reduce_scatter_single":
        finish(comm.reduce_scatter_single, out, mine, op)
        expected = reduced([x[rank * numel :][:numel] for x in everyone], op)
    elif name == "all_to_all_single":
        out = torch.full((numel * SIZE,), 77, dtype=dtype)
        finish(comm.all_to_all_single, out, mine)
        expected = torch.cat([x[rank * numel :][:numel] for x in everyone])
    else:
        expected = everyone[source][:numel] if rank == target else out.clone()
        if rank == source:
            finish(comm.send, mine[:numel].clone(), target)
        elif rank == target:
            finish(comm.recv, out, source)
    assert torch.equal(out, expected), f"seed {seed}: {name} of {numel} {dtype}, {op}"


@pytest.mark.parametrize("first", [0, 1000])
def test_random_operations(place, first):
    def program(comm):
        own = random.Random(comm.get_rank() + first)
        for seed in range(first, first + 80):
            run_one(comm, seed, own.random() < 0.5)
        return inside.fast_path(comm).seq

    assert len(set(run_ranks(program, SIZE, **place))) == 1


def test_small_operations_take_one_native_call(place, monkeypatch):

    def program(comm):
        x = torch.ones(4)
        comm.all_reduce(x, ReduceOp.SUM, async_op=False)  # the ranks are past their creation
        issued = []
        monkeypatch.setattr(Engine, "issue", lambda self, op: issued.append(op.name))
        comm.barrier(async_op=False)
        for _ in range(3):
            comm.all_reduce(x, ReduceOp.SUM, async_op=False)
        if comm.get_rank() in (1, 2):
            comm.send(x, 3 - comm.get_rank(), False) if comm.get_rank() == 1 else comm.recv(x, 1, False)
        comm.barrier(async_op=False)
        return issued, x.tolist()

    assert run_ranks(program, SIZE, **place) == [([], [256.0] * 4)] * SIZE


@pytest.mark.parametrize("general", [(), (0,), (0, 1, 2, 3)])
def test_a_mismatch_is_the_same_error_on_both_ways(place, raised, general):
    def program(comm):
        rank = comm.get_rank()
        x = torch.ones(3 if rank == 2 else 4)

        def call():
            work = comm.all_reduce(x, ReduceOp.SUM, async_op=rank in general)
            work.wait()

        error = raised(call)
        assert x.unique().tolist() == [1.0]
        y = torch.full((2,), 1.0)
        comm.all_reduce(y, ReduceOp.SUM, async_op=False)  # the ranks are in step
        return type(error), error.culprits, y.tolist()

    assert run_ranks(program, SIZE, **place) == [(MismatchError, (2,), [4.0, 4.0])] * SIZE
