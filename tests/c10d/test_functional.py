"""Collectives as functions: values, gradients and shapes, for communicators and for process groups."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensorMode

from unicomm import Communicator, InvalidArgumentError, UnsupportedError, functional, new_comm
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

N = 3


def part(x, r):
    return x[r * (x.shape[0] // N) : (r + 1) * (x.shape[0] // N)]


def rows(x, splits, r):
    return torch.split(x, splits)[r]


OUT_SPLITS = [[1, 2, 0], [3, 1, 1], [2, 3, 2]]  # of each rank
IN_SPLITS = [[OUT_SPLITS[to][frm] for to in range(N)] for frm in range(N)]
PERMUTATION = [2, 0, 1]

# (arguments of a rank, its input's shape, all inputs -> all results), everything in one process.
CASES = {
    "all_reduce": (lambda r: ("sum",), lambda r: (4, 2), lambda xs: [sum(xs)] * N),
    "all_reduce avg": (lambda r: ("avg",), lambda r: (5,), lambda xs: [sum(xs) / N] * N),
    "broadcast": (lambda r: (1,), lambda r: (2, 3), lambda xs: [xs[1] * 1] * N),
    "reduce": (lambda r: (2, "sum"), lambda r: (4,), lambda xs: [xs[0] * 1, xs[1] * 1, sum(xs)]),
    "reduce avg": (lambda r: (0, "avg"), lambda r: (4,), lambda xs: [sum(xs) / N, xs[1] * 1, xs[2] * 1]),
    "all_gather_single": (lambda r: (), lambda r: (2, 3), lambda xs: [torch.cat(xs)] * N),
    "all_gather_single scalar": (lambda r: (), lambda r: (), lambda xs: [torch.stack(xs)] * N),
    "reduce_scatter_single": (
        lambda r: ("sum",),
        lambda r: (6, 2),
        lambda xs: [part(sum(xs), r) for r in range(N)],
    ),
    "reduce_scatter_single avg": (
        lambda r: ("avg",),
        lambda r: (3,),
        lambda xs: [part(sum(xs) / N, r) for r in range(N)],
    ),
    "all_to_all_single": (
        lambda r: (),
        lambda r: (6, 2),
        lambda xs: [torch.cat([part(x, r) for x in xs]) for r in range(N)],
    ),
    "all_to_all_v_single": (
        lambda r: (OUT_SPLITS[r], IN_SPLITS[r]),
        lambda r: (sum(IN_SPLITS[r]), 2),
        lambda xs: [torch.cat([rows(x, IN_SPLITS[i], r) for i, x in enumerate(xs)]) for r in range(N)],
    ),
    "gather": (
        lambda r: (1,),
        lambda r: (2, 3),
        lambda xs: [xs[0][:0], torch.cat(xs), xs[2][:0]],
    ),
    "gather scalar": (
        lambda r: (0,),
        lambda r: (),
        lambda xs: [torch.stack(xs), torch.stack([xs[1]])[:0], torch.stack([xs[2]])[:0]],
    ),
    "scatter": (
        lambda r: (1, 2),
        lambda r: (6 if r == 1 else r, 2),
        lambda xs: [part(xs[1], r) for r in range(N)],
    ),
    "scatter of no rows": (
        lambda r: (1, 0),
        lambda r: (0 if r == 1 else r, 2),
        lambda xs: [xs[1][:0] for r in range(N)],
    ),
    "reduce_to_root": (lambda r: (2,), lambda r: (4,), lambda xs: [xs[0] * 0, xs[1] * 0, sum(xs)]),
    "gather_to_root": (
        lambda r: (0, [6, 2] if r == 0 else [r, 2]),
        lambda r: (2, 2),
        lambda xs: [torch.cat(xs), xs[1][:1] * 0, xs[2] * 0],
    ),
    "permute": (
        lambda r: (PERMUTATION,),
        lambda r: (2, 2),
        lambda xs: [xs[PERMUTATION.index(r)] * 1 for r in range(N)],
    ),
    "permute to itself": (
        lambda r: ([1, 0, 2],),
        lambda r: (2,),
        lambda xs: [xs[1] * 1, xs[0] * 1, xs[2] * 1],
    ),
}


def seeded(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def group_of(comm, kind):
    return comm if kind == "communicator" else UnicommProcessGroup(comm)


def check_values_and_gradients(op, case, kind, compare):
    """`op` on N ranks gives what one process gets that holds all ranks' inputs and adds all ranks' losses.

    `compare(y, expected)` compares a rank's result.
    """
    arguments, shape, together = CASES[case]
    inputs = [seeded(shape(r), r).requires_grad_() for r in range(N)]
    expected = together(inputs)
    weights = [seeded(y.shape, 10 + r) for r, y in enumerate(expected)]
    sum((y * w).sum() for y, w in zip(expected, weights, strict=True)).backward()

    def program(comm: Communicator) -> None:
        r = comm.get_rank()
        x = seeded(shape(r), r).requires_grad_()
        y = op(x, *arguments(r), group_of(comm, kind))
        compare(y, expected[r])
        (y * weights[r]).sum().backward()
        alone = inputs[r].grad
        torch.testing.assert_close(x.grad, torch.zeros_like(x) if alone is None else alone)

    run_ranks(program, N)


@pytest.mark.parametrize("kind", ["communicator", "process group"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, kind):
    op = getattr(functional, case.split()[0])
    check_values_and_gradients(op, case, kind, torch.testing.assert_close)


@pytest.mark.parametrize("case", ["all_reduce", "all_gather_single", "reduce_scatter_single avg"])
def test_coalesced(case):
    arguments, shape, together = CASES[case]
    op = getattr(functional, case.split()[0] + "_coalesced")
    lists = [[seeded(shape(r), 100 * i + r).requires_grad_() for r in range(N)] for i in range(2)]
    expected = [together(xs) for xs in lists]
    sum(y.pow(2).sum() for ys in expected for y in ys).backward()

    def program(comm: Communicator) -> None:
        r = comm.get_rank()
        xs = [seeded(shape(r), 100 * i + r).requires_grad_() for i in range(2)]
        ys = op(xs, *arguments(r), comm)
        sum(y.pow(2).sum() for y in ys).backward()
        for i in range(2):
            torch.testing.assert_close(ys[i], expected[i][r])
            torch.testing.assert_close(xs[i].grad, lists[i][r].grad)

    run_ranks(program, N)


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_known_without_running(case):
    arguments, shape, together = CASES[case]
    expected = together([seeded(shape(r), r) for r in range(N)])
    for r in range(N):
        with new_comm("fake", torch.device("cpu"), rank=r, size=N) as comm, FakeTensorMode():
            for group in (comm, UnicommProcessGroup(comm)):
                x = torch.empty(shape(r), dtype=torch.float64)
                y = getattr(functional, case.split()[0])(x, *arguments(r), group)
                assert (y.shape, y.dtype) == (expected[r].shape, expected[r].dtype)
                assert y.is_contiguous()


@pytest.mark.parametrize("name", functional.OPS)
def test_torch_finds_nothing_to_object(name):
    """torch's own checks of a custom operator: schema, aliasing, fake kernel, autograd, AOT dispatch."""
    special = {
        "reduce": (0, "sum"),
        "permute": ([0],),
        "all_to_all_v_single": ([2], [2]),
        "broadcast": (0,),
        "broadcast_": (0,),
        "gather": (0,),
        "reduce_to_root": (0,),
        "gather_to_root": (0, [2, 3]),
        "scatter": (0, 2),
    }
    takes_op = "str op" in functional.OPS[name].arguments
    arguments = special.get(name, ("sum",) if takes_op else ())
    x = torch.ones(2, 3, requires_grad=not name.endswith("_"))
    tensors = [x, x.detach().clone().requires_grad_()] if name.endswith("coalesced") else x
    with new_comm("shm", torch.device("cpu")) as comm:
        packet = getattr(torch.ops.unicomm, name)
        torch.library.opcheck(packet.comm, (tensors, *arguments, comm))


def test_in_place_and_views():
    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        assert functional.all_reduce_(x, "sum", comm) is None
        assert x.tolist() == [2.0] * 3
        functional.broadcast_(x.mul_(comm.get_rank() + 1), 1, comm)
        assert x.tolist() == [4.0] * 3
        turned = (torch.arange(6.0).reshape(2, 3) + comm.get_rank()).T
        torch.testing.assert_close(
            functional.all_gather_single(turned, comm),
            torch.cat([(torch.arange(6.0).reshape(2, 3) + r).T for r in range(2)]),
        )
        z = torch.complex(torch.ones(2), torch.ones(2)).conj()
        torch.testing.assert_close(functional.all_reduce(z, "sum", comm), z.resolve_conj() * 2)
        assert functional.all_reduce(torch.tensor([1, 7]), "max", comm).tolist() == [1, 7]

    run_ranks(program, 2)


def test_errors_come_before_anything_happens(raised):
    def program(comm: Communicator) -> None:
        x = torch.ones(3, requires_grad=True)
        assert "is no reduction" in str(raised(functional.all_reduce, x, "median", comm))
        assert "cut into 2 equal parts" in str(raised(functional.reduce_scatter_single, x, "sum", comm))
        assert "no permutation" in str(raised(functional.permute, x, [0, 0], comm))
        assert "does not have 2 rows for each" in str(raised(functional.scatter, x, comm.get_rank(), 2, comm))
        assert "root=2 is no rank" in str(raised(functional.gather, x, 2, comm))
        y = functional.all_reduce(x, "max", comm)
        assert type(raised(y.sum().backward)) is UnsupportedError
        assert functional.all_reduce(torch.ones(1), "sum", comm).item() == 2.0

    run_ranks(program, 2)
    assert issubclass(InvalidArgumentError, Exception)


def test_a_group_without_communicators_is_refused(raised):
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    error = raised(functional.all_reduce, torch.ones(1), "sum", group)
    assert type(error) is UnsupportedError
    assert 'init_process_group("unicomm")' in str(error)


def test_functions_explain_themselves():
    for name in functional.OPS:
        function = getattr(functional, name)
        assert "torch.ops.unicomm::" + name in function.__doc__
        assert list(inspect.signature(function).parameters)[-1] == "group"


def test_a_branch_of_cond_takes_torchs_operators_and_not_ours():
    """As docs/torch-distributed.md says: torch passes only tensors and integers into a branch."""

    def theirs(x, chosen, group):
        return torch.cond(chosen, lambda y: funcol.all_reduce(y, "sum", group) + 0, lambda y: y.clone(), (x,))

    def ours(x, chosen, group):
        return torch.cond(
            chosen, lambda y: functional.all_reduce(y, "sum", group) + 0, lambda y: y.clone(), (x,)
        )

    x, chosen = torch.ones(4), torch.tensor(True)
    dist.init_process_group("unicomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for function in (theirs, torch.compile(theirs, fullgraph=True, backend="aot_eager")):
            assert function(x, chosen, dist.group.WORLD).tolist() == [1.0] * 4
        with pytest.raises(Exception, match="can only be of"):
            ours(x, chosen, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
