"""The hint `reduction=reproducible`: the same bits on all backends, for any order and number of hosts."""

import math

import pytest
import torch

import unicomm
from unicomm.testing import run_ranks

SUM, AVG = unicomm.ReduceOp.SUM, unicomm.ReduceOp.AVG
HINT = {"reduction": "reproducible"}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COUNTS = (1, 67, 70001)


def part(rank, count, dtype):
    """What a rank adds: numbers whose ordinary sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    scale = torch.exp2(torch.randint(-12, 4, (count,), generator=generator).double())
    return (values * scale).to(dtype)


def bits(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def reductions(comm, order, hints=None):
    """All reductions, with the parts dealt to the ranks in `order`; the same list on all ranks."""
    n, me, found = comm.get_size(), comm.get_rank(), []
    for dtype in DTYPES:
        for op in (SUM, AVG):
            for count in COUNTS:
                x = part(order[me], count, dtype)
                y = x.clone()
                comm.all_reduce(x, op, hints=hints)
                found.append(bits(x))
                comm.reduce(y, n - 1, op, hints=hints)
                comm.broadcast(y, n - 1)
                assert bits(y) == bits(x)
                for name in ("reduce_scatter", "reduce_scatter_v", "reduce_scatter_single"):
                    parts = [part(order[me], count, dtype)] * n
                    out = torch.empty(count, dtype=dtype)
                    given = torch.cat(parts) if name.endswith("single") else [p.clone() for p in parts]
                    getattr(comm, name)(out, given, op, hints=hints)
                    assert bits(out) == bits(x), (name, dtype, op, count)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_all_backends_and_orders_give_the_same_bits(size):
    def program(order, hints=None):
        return lambda comm: reductions(comm, order, hints)

    forth, back = list(range(size)), list(range(size))[::-1]
    want = run_ranks(program(forth, HINT), size, backend="shm")
    assert all(one == want[0] for one in want)
    others = [run_ranks(program(back), size, backend="shm", hints=HINT)]
    if size > 1:
        others.append(run_ranks(program(back, HINT), size, backend="gloo"))
        layout = ",".join("ab"[r * 2 // size] for r in range(size))
        others.append(run_ranks(program(back), size, backend="auto", hints={"hosts": layout, **HINT}))
    assert all(one == want[0] for other in others for one in other)


def test_float64_sums_are_those_of_fsum():
    def program(comm):
        x = part(comm.get_rank(), 500, torch.float64)
        comm.all_reduce(x, SUM, hints=HINT)
        return x.tolist()

    columns = zip(*(part(r, 500, torch.float64).tolist() for r in range(5)), strict=True)
    want = [math.fsum(column) for column in columns]
    assert run_ranks(program, 5) == [want] * 5


def test_what_rounds_and_cannot_be_reproducible_is_refused_before_it_begins():
    def program(comm):
        for op, dtype in (
            (unicomm.ReduceOp.PRODUCT, torch.float32),
            (unicomm.ReduceOp.PREMUL_SUM(2.0), torch.float32),
            (SUM, torch.complex64),
            (SUM, torch.float8_e5m2),
        ):
            with pytest.raises(unicomm.UnsupportedError, match="reproducible"):
                comm.all_reduce(torch.ones(3).to(dtype), op)
            x = torch.ones(3).to(dtype)
            comm.all_reduce(x, op, hints={"reduction": "ordinary"})
        with pytest.raises(unicomm.InvalidArgumentError, match="expected ordinary or reproducible"):
            comm.all_reduce(torch.ones(3), SUM, hints={"reduction": "exact"})
        with pytest.raises(unicomm.UnsupportedError, match="takes no hints"):
            comm.all_reduce(torch.ones(3), SUM, hints={"other": "1"})
        x = torch.full((3,), comm.get_rank() + 1)
        comm.all_reduce(x, SUM)
        y = torch.full((3,), float(comm.get_rank()))
        comm.all_reduce(y, unicomm.ReduceOp.MAX)
        return x.tolist(), y.tolist()

    assert run_ranks(program, 2, hints=HINT) == [([3, 3, 3], [1.0, 1.0, 1.0])] * 2


def test_ranks_that_disagree_get_a_mismatch():
    def program(comm):
        hints = HINT if comm.get_rank() == 0 else None
        with pytest.raises(unicomm.MismatchError, match="REPRODUCIBLE_SUM"):
            comm.all_reduce(torch.ones(3), SUM, hints=hints)

    run_ranks(program, 3)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab"])
@pytest.mark.parametrize("differ", ["sizes", "operations", "small and large"])
def test_ranks_of_several_hosts_that_disagree(hosts, differ):
    """Such a reduction is composed there of others, whose own signatures do not tell."""
    sizes = {"sizes": (100, 200), "operations": (100, 100), "small and large": (100, 5000)}[differ]

    def program(comm):
        odd = comm.get_rank() == 1
        op = AVG if odd and differ == "operations" else SUM
        with pytest.raises(unicomm.MismatchError) as raised:
            comm.all_reduce(torch.ones(sizes[odd]), op)
        assert raised.value.culprits == (1,)

    run_ranks(program, len(hosts), backend="auto", hints={**HINT, "hosts": ",".join(hosts)}, timeout=30)


def test_split_and_environment(monkeypatch):
    def program(comm):
        x = torch.tensor([[1e30, 1.0, -1e30][comm.get_rank()]])
        child = comm.split([0, 1, 2], "child")
        child.all_reduce(x, SUM)
        child.finalize()
        return x.item()

    assert run_ranks(program, 3, hints=HINT) == [1.0] * 3
    assert run_ranks(program, 3) == [0.0] * 3
    monkeypatch.setenv("UNICOMM_REDUCTION", "reproducible")
    assert run_ranks(program, 3) == [1.0] * 3
