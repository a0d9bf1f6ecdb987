"""Modes of torch in which a program may call: another default device or type, and inference."""

import pytest
import torch
import torch.distributed as dist

from tests.comms import inside
from unicomm import ReduceOp, symm
from unicomm.c10d.hooks import compressed
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

PLACES = {
    "shm": ("shm", 2, {}),
    "gloo": ("gloo", 2, {}),
    "hosts": ("auto", 4, {"hosts": "a,a,b,b"}),
    "hosts over gloo": ("auto", 4, {"hosts": "a,a,b,b", "between": "gloo"}),
    "hosts of other sizes": ("auto", 3, {"hosts": "a,a,b"}),
}


def every_collective(comm, count, made):
    """Runs the collectives on tensors that `made(count, value)` makes, and compares the results."""
    n, me = comm.get_size(), comm.get_rank()

    def mine(length=count):
        return made(length, me + 1)

    def holds(x, *values):
        for part, value in zip(x.chunk(len(values)), values, strict=True):
            assert (part == value).all(), (x, values)

    total, ranks = n * (n + 1) // 2, [r + 1 for r in range(n)]
    whole, part, sent = made(n * count, 0), made(count, 0), mine(n * count)
    parts, uneven = ([made(count + more * r, 0) for r in range(n)] for more in (0, 1))
    comm.all_reduce(x := mine(), ReduceOp.SUM, False)
    holds(x, total)
    comm.reduce(x := mine(), 0, ReduceOp.SUM, False)
    holds(x, total if me == 0 else me + 1)
    comm.broadcast(x := mine(), 1, False)
    holds(x, 2)
    comm.all_gather(parts, mine(), False)
    holds(torch.cat(parts), *ranks)
    comm.all_gather_single(whole, mine(), False)
    holds(whole, *ranks)
    comm.all_gather_v(uneven, mine(count + me), False)
    for rank, one in enumerate(uneven):
        holds(one, rank + 1)
    comm.reduce_scatter_single(part, sent, ReduceOp.SUM, False)
    holds(part, total)
    comm.reduce_scatter(part, list(sent.chunk(n)), ReduceOp.SUM, False)
    holds(part, total)
    comm.reduce_scatter_v(uneven[me], [mine(count + r) for r in range(n)], ReduceOp.SUM, False)
    holds(uneven[me], total)
    comm.all_to_all_single(whole, sent, False)
    holds(whole, *ranks)
    comm.gather(parts if me == 0 else [], mine(), 0, False)
    comm.scatter(part, list(sent.chunk(n)) if me == 1 else [], 1, False)
    holds(part, 2)
    comm.barrier(False)


def plain(count, value, dtype=torch.float32):
    return torch.full((count,), float(value), dtype=dtype, device="cpu")


def inference(count, value, dtype=torch.float32):
    with torch.inference_mode():
        return plain(count, value, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_another_default_device(place, dtype):
    """As for deferred initialization, or `torch.set_default_device("cuda")`."""
    backend, n, hints = PLACES[place]

    def program(comm):
        with torch.device("meta"):
            for count in (3, 20_000):
                every_collective(comm, count, lambda length, value: plain(length, value, dtype))

    run_ranks(program, n, backend=backend, hints=hints or None)


@pytest.mark.parametrize("place", PLACES)
def test_outputs_made_for_inference(place):
    backend, n, hints = PLACES[place]

    def program(comm):
        for count in (3, 20_000):
            every_collective(comm, count, inference)
            x, sent = (inference(length, 1, torch.bfloat16) for length in (count, n * count))
            comm.reduce_scatter_single(x, sent, ReduceOp.SUM, True).wait()
            assert (x == n).all()
            for hints in ({"wire": "int8"}, {"wire": "bfloat16"}):
                out, rows = inference(count, 0), torch.ones(n * count)
                comm.reduce_scatter_single(out, rows, ReduceOp.SUM, False, hints=hints)
                assert torch.allclose(out, torch.full((count,), float(n)), rtol=0.02)
                comm.all_reduce(out, ReduceOp.SUM, False, hints=hints)
                assert torch.allclose(out, torch.full((count,), float(n * n)), rtol=0.04)

    run_ranks(program, n, backend=backend, hints=hints or None)


def test_what_was_lost_is_float32_whatever_the_default_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        hook = compressed("int8")
        gradient = torch.ones(8, dtype=torch.float32)
        assert hook._lost_of("x", gradient).dtype == torch.float32
        assert hook._lost_of_bucket([gradient], gradient).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("place", ["gloo", "hosts"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter_single"])
def test_a_factor_of_zero_loses_nothing(place, name):
    backend, n, hints = PLACES[place]

    def program(comm):
        lost = torch.full((n * 20_000,), 0.25)
        x, out = torch.linspace(1, 2, n * 20_000), torch.full((20_000,), -1.0)
        tensors = (x,) if name == "all_reduce" else (out, x)
        options = {"wire": "int8"}, None
        inside.engine(comm).collective(
            name, tensors, False, *options, op=ReduceOp.PREMUL_SUM(0.0), residual=lost
        )
        assert (tensors[0] == 0).all()
        assert (lost == 0).all()

    run_ranks(program, n, backend=backend, hints=hints or None)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_permuted_outputs_made_for_inference(backend):
    def program(comm):
        group = UnicommProcessGroup(comm)
        for later in (False, True):
            options = dist.AllreduceOptions()
            options.asyncOp = later
            with torch.inference_mode():
                x = torch.ones(20, 30).t()
            work = group.allreduce([x], options)
            work.wait()
            assert (x == 2).all()
            assert (work.get_future().wait()[0] == 2).all()

    run_ranks(program, 2, backend=backend)


def test_permuted_parameters_are_written_without_autograd():
    def program(comm):
        group = UnicommProcessGroup(comm)
        parameter = torch.ones(20, 30).t().requires_grad_()
        with torch.no_grad():
            group.allreduce([parameter], dist.AllreduceOptions()).wait()
        assert (parameter == 2).all()
        assert parameter.is_leaf

    run_ranks(program, 2)


def test_symmetric_memory_under_another_default_device():
    def program(comm):
        with torch.device("meta"):
            symm.init(comm)
            x = symm.empty(4, comm=comm)
            x.fill_(comm.get_rank())
            comm.barrier()
            if comm.get_rank() == 0:
                symm.get(x, 1, comm)
            comm.barrier()
            assert x.tolist() == [1.0] * 4

    run_ranks(program, 2)
