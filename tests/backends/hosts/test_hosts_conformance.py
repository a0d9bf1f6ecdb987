"""The conformance suite over layouts of ranks on hosts, with ranks as threads and hosts by the hint."""

import pytest
import torch

import unicomm
from unicomm.backends.hosts import collectives as hosts_collectives
from unicomm.comms.operations.reduction import RedOpType
from unicomm.testing import conformance, run_ranks

pytestmark = pytest.mark.usefixtures("between")

# Even, uneven, several alone, and in no order at all.
LAYOUTS = ["a,a,b,b", "a,b,b", "a,b,a,c", "c,a,b,b,a"]
#: The cases that every layout runs: nothing, inline and large; the last layout runs all there are.
COUNTS = (0, 17, 67, 70001)


def chosen(layout, case):
    """All cases of the last layout. Not the signs of a complex product's zeros: they depend on the order in
    which factors are multiplied, and that goes by hosts."""
    if case.dtype.is_complex and case.op is not None and case.op.type is RedOpType.PRODUCT:
        return False
    return layout == LAYOUTS[-1] or case.count in COUNTS


@pytest.mark.parametrize("operation", conformance.OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operation(layout, operation):
    def program(comm):
        assert comm.get_backend() == "hosts"
        return conformance.check(comm, operation, lambda case: chosen(layout, case))

    counts = run_ranks(program, layout.count(",") + 1, backend="auto", hints={"hosts": layout})
    assert len(set(counts)) == 1
    assert counts[0] > 20


@pytest.mark.parametrize("operation", ["all_reduce", "reduce"])
def test_large_reductions_go_piece_by_piece(monkeypatch, operation):
    monkeypatch.setattr(hosts_collectives, "_PIECE", 30000)

    def program(comm):
        return conformance.check(comm, operation, lambda case: case.count == 70001)

    assert min(run_ranks(program, 5, backend="auto", hints={"hosts": "a,b,b,a,a"})) > 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("count", [67, 4099])
def test_complex_products(dtype, count):
    def program(comm):
        everyone = [conformance.values(r, count, dtype) for r in range(3)]
        x = everyone[comm.get_rank()].clone()
        comm.all_reduce(x, unicomm.ReduceOp.PRODUCT, False)
        assert torch.equal(x, everyone[0] * everyone[1] * everyone[2])
        return bytes(x.view(torch.uint8).numpy())

    assert len(set(run_ranks(program, 3, backend="auto", hints={"hosts": "a,b,b"}))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [100, 50_000])
def test_all_ranks_have_the_same_bits(dtype, count):
    """Sums that have to be rounded, and so depend on the order, come out alike everywhere."""

    def program(comm):
        x = torch.rand(count, generator=torch.Generator().manual_seed(comm.get_rank())).to(dtype)
        comm.all_reduce(x, unicomm.ReduceOp.AVG, False)
        return bytes(x.view(torch.uint8).numpy())

    assert len(set(run_ranks(program, 5, backend="auto", hints={"hosts": "a,b,b,c,a"}))) == 1
