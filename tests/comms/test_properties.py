"""Random legal programs give what the definition says, whatever their operations, shapes and mode."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not
from unicomm.testing import conformance, run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool]
REDUCTIONS = [*(ReduceOp(t) for t in RedOpType if t is not RedOpType.PREMUL_SUM), ReduceOp.PREMUL_SUM(2.0)]


@st.composite
def steps(draw, world):
    operation = draw(st.sampled_from(conformance.OPERATIONS))
    dtype = draw(st.sampled_from(DTYPES))
    return conformance.Case(
        operation,
        dtype,
        draw(st.sampled_from([0, 1, 4, 5, 16, 63, 64, 65, 1024, 4097, 40000])),
        draw(st.sampled_from(["flat", "matrix", "offset"])),
        draw(st.sampled_from([op for op in REDUCTIONS if why_not(op, dtype) is None])),
        draw(st.booleans()),
        draw(st.integers(0, world - 1)),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), world=st.integers(2, 4))
def test_random_programs(data, world):
    program = data.draw(st.lists(steps(world), min_size=1, max_size=12))

    def run(comm):
        for case in program:
            conformance.check_case(comm, case)
        return comm.barrier(False).seq

    assert len(set(run_ranks(run, world))) == 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 50_000), min_size=2, max_size=5),
    seed=st.integers(0, 1000),
)
def test_sums_of_random_numbers_have_the_same_bits_everywhere(sizes, seed):
    """In one piece or in many, on every rank: the left fold in rank order, rounded once per addition."""

    def run(comm):
        out = []
        for size in sizes:
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(seed + r))
                for r in range(comm.get_size())
            ]
            expected = parts[0].clone()
            for part in parts[1:]:
                expected += part
            mine = parts[comm.get_rank()].clone()
            comm.all_reduce(mine, ReduceOp.SUM, False)
            out.append(torch.equal(mine, expected))
        return out

    assert run_ranks(run, 3) == [[True] * len(sizes)] * 3


def test_bfloat16_is_accumulated_in_float32():
    """1 + 2**-9 eight times: in bfloat16 each addition would be lost; in float32 none is."""

    def run(comm):
        small = 2.0**-9
        x = torch.tensor([1.0 if comm.get_rank() == 0 else small], dtype=torch.bfloat16)
        comm.all_reduce(x, ReduceOp.SUM, False)
        return x.item()

    exact = torch.tensor(1.0 + 7 * 2.0**-9).bfloat16().item()
    assert exact != 1.0
    assert run_ranks(run, 8) == [exact] * 8
    assert run_ranks(run, 8, backend="gloo") == [exact] * 8


def test_corner_cases_of_reductions():
    def run(comm):
        me = comm.get_rank()
        nan = torch.tensor([float("nan") if me else 1.0, 2.0])
        low, high = nan.clone(), nan.clone()
        comm.all_reduce(low, ReduceOp.MIN, False)
        comm.all_reduce(high, ReduceOp.MAX, False)
        mean = torch.tensor([-3, 3, -7][:3]) if me == 0 else torch.tensor([0, 0, 0])
        comm.all_reduce(mean, ReduceOp.AVG, False)
        around = torch.tensor([127, -128], dtype=torch.int8)
        comm.all_reduce(around, ReduceOp.SUM, False)
        own = torch.ones(1)
        comm.all_reduce(own, ReduceOp.PREMUL_SUM(10.0 if me else 1.0), False)
        return low.isnan().tolist(), high.isnan().tolist(), mean.tolist(), around.tolist(), own.item()

    for backend in ("shm", "gloo"):
        expected = ([True, False], [True, False], [-1, 1, -3], [-2, 0], 11.0)
        assert run_ranks(run, 2, backend=backend) == [expected] * 2
