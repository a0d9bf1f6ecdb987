"""Reductions by torch give what those of the native core give, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.old_torch import OLD_TORCH
from unicomm import _core
from unicomm.comms.execution.device import fold as device_fold
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not

OPS = [ReduceOp(t) if t != RedOpType.PREMUL_SUM else ReduceOp.PREMUL_SUM(3) for t in RedOpType]
PAIRS = [(d, op) for d in DTYPES for op in OPS if why_not(op, d) is None]


def random_tensor(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return (4 * torch.randn(count, dtype=wide, generator=generator)).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), generator=generator).to(torch.uint8).view(dtype)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda v: str(v).removeprefix("torch."))
def test_as_the_native_core(dtype: torch.dtype, op: ReduceOp) -> None:
    if OLD_TORCH and dtype == torch.float8_e4m3fn and op.type == RedOpType.PRODUCT:
        pytest.skip("this torch casts what is too large to NaN, later ones to the largest number")
    generator = torch.Generator().manual_seed(7)
    for ranks in (1, 2, 3, 8):
        if op.type == RedOpType.AVG and dtype == torch.uint64:
            pytest.skip("torch has no division of uint64; the libraries that need this one divide them")
        sources = [random_tensor(dtype, 65, generator) for _ in range(ranks)]
        factors = [float(i + 1) for i in range(ranks)] if op.factor is not None else None
        expected, found = torch.empty_like(sources[0]), torch.empty_like(sources[0])
        assert _core.fold(expected, sources, op.code, factors, ranks)
        device_fold.fold(found, sources, op, factors)
        if dtype.is_complex and op.type == RedOpType.PRODUCT:  # a compiler may fuse its multiplications
            torch.testing.assert_close(found, expected)
            continue
        same = expected.view(torch.uint8) == found.view(torch.uint8)
        both_nan = expected.isnan() & found.isnan() if dtype.is_floating_point else torch.tensor(False)
        assert bool(same.all()) or bool((same.view(65, -1).all(1) | both_nan).all())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2, max_size=4), st.sampled_from([ReduceOp.MIN, ReduceOp.MAX]))
def test_nan_is_passed_on(values: list[float], op: ReduceOp) -> None:
    out = torch.empty(1)
    device_fold.fold(out, [torch.tensor([v]) for v in values], op, None)
    want = torch.empty(1)
    assert _core.fold(want, [torch.tensor([v]) for v in values], op.code, None, len(values))
    assert torch.equal(out, want) or (out.isnan().all() and want.isnan().all())
