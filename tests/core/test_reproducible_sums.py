"""Reproducible sums of the native core against exact arithmetic, by every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.instruction_sets import BEST, ISAS
from unicomm import _core

SUM, AVG = 10, 11  # Red::kReproducibleSum, kReproducibleAvg
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# dtype: bits of the significand, exponent of the smallest step, exponent that is too large
FORMATS = {
    torch.float64: (53, -1074, 1024),
    torch.float32: (24, -149, 128),
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
}


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    _core.set_fold_isa(BEST)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.element_size()])


def fold(inputs: list[torch.Tensor], op: int = SUM) -> torch.Tensor:
    """The fold by the best instruction set, after checking that all others give the same bits."""
    outs = []
    for isa in ISAS:
        assert _core.set_fold_isa(isa)
        out = torch.empty_like(inputs[0])
        assert _core.fold(out, inputs, op, None, len(inputs))
        outs.append(out)
    _core.set_fold_isa(BEST)
    for isa, out in zip(ISAS, outs, strict=True):
        assert torch.equal(bits(out), bits(outs[0])), isa
    return outs[0]


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of the dtype, the even one of two, by whole numbers alone."""
    precision, lowest, top = FORMATS[dtype]
    sign, magnitude = (-1 if exact < 0 else 1), abs(exact)
    if not magnitude:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = max(exponent - precision + 1, lowest)
    whole = round(magnitude / Fraction(2) ** step)  # half to even
    value = whole * Fraction(2) ** step
    return sign * (float("inf") if value >= Fraction(2) ** top else float(value))


def reference(column: list[float], dtype: torch.dtype, op: int) -> float:
    """The definition: the exact sum rounded once; an average by way of float64."""
    if any(np.isnan(x) for x in column) or {float("inf"), -float("inf")} <= set(column):
        return float("nan")
    if infinite := [x for x in column if x in (float("inf"), -float("inf"))]:
        return infinite[0]
    total = sum((Fraction(x) for x in column), Fraction(0))
    if not total and op == SUM:
        return -0.0 if all(str(x) == "-0.0" for x in column) else 0.0
    if op == SUM:
        return rounded(total, dtype)
    double = rounded(total, torch.float64)
    if not total:
        double = -0.0 if all(str(x) == "-0.0" for x in column) else 0.0
    quotient = double / len(column)
    if quotient in (float("inf"), -float("inf"), 0.0):
        return quotient
    return rounded(Fraction(quotient), dtype) or quotient * 0.0


def samples(dtype: torch.dtype, n: int, count: int, seed: int) -> list[torch.Tensor]:
    """Columns of several kinds: alike in size, far apart, cancelling, tiny, and of random bits."""
    rng = np.random.default_rng(seed)
    size = dtype.itemsize
    low, high = {torch.float64: (-300, 300), torch.float16: (-20, 12)}.get(dtype, (-120, 120))
    values = torch.from_numpy(rng.standard_normal((n, count))).to(dtype)
    kind = torch.arange(count) % 6
    apart = torch.from_numpy(rng.standard_normal((n, count)) * np.exp2(rng.uniform(low, high, (n, count))))
    near = torch.from_numpy(rng.standard_normal((n, count)) * np.exp2(rng.uniform(-60, 0, (n, count))))
    raw = torch.from_numpy(rng.integers(0, 256, n * count * size, dtype=np.uint8)).view(dtype)
    values = torch.where(kind == 1, apart.to(dtype), values)
    values = torch.where(kind == 2, near.to(dtype), values)
    values = torch.where(kind == 3, raw.reshape(n, count), values)
    cancels = (apart.to(dtype) if dtype != torch.float16 else values).clone()
    cancels[n // 2 :] = -cancels[: n - n // 2].flip(0)
    values = torch.where(kind == 4, cancels, values)
    zeros = torch.from_numpy(np.where(rng.integers(0, 2, (n, count)), 0.0, -0.0)).to(dtype)
    values = torch.where(kind == 5, zeros, values)
    return [values[k].contiguous() for k in range(n)]


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_exact_sum_is_rounded_once(dtype: torch.dtype, op: int) -> None:
    for n, count in ((1, 37), (2, 301), (3, 301), (5, 64), (8, 301), (100, 12)):
        inputs = samples(dtype, n, count, 10 * n)
        got = fold(inputs, op)
        columns = torch.stack(inputs).double().T.tolist()
        want = torch.tensor([reference(c, dtype, op) for c in columns], dtype=torch.float64).to(dtype)
        same = (bits(got) == bits(want)) | (got.isnan() & want.isnan())
        assert bool(same.all()), (n, columns[int((~same).nonzero()[0])])
        nans = bits(got)[got.isnan()]
        assert nans.unique().numel() <= 1  # one NaN, whichever came in


@pytest.mark.parametrize("op", [SUM, AVG], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_order_gives_the_same_bits(dtype: torch.dtype, op: int) -> None:
    rng = np.random.default_rng(5)
    for n in (2, 3, 4, 7, 8, 33):
        inputs = samples(dtype, n, 500, n)
        want = bits(fold(inputs, op))
        for _ in range(4):
            order = rng.permutation(n)
            assert torch.equal(bits(fold([inputs[k] for k in order], op)), want)


def test_sums_that_overflow_on_the_way_come_back() -> None:
    for dtype in DTYPES:
        x, one = torch.full((21,), torch.finfo(dtype).max, dtype=dtype), torch.ones(21, dtype=dtype)
        assert torch.equal(fold([x, x, -x, -x, one]), one)
        assert bool(fold([x, x]).isinf().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_that_flush_denormals_get_the_same_bits(dtype: torch.dtype) -> None:
    inputs = [torch.full((40,), 2.0 ** FORMATS[dtype][1], dtype=torch.float64).to(dtype)] * 3
    want = bits(fold(inputs))
    assert bool((want == 3).all())
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = fold(inputs)
        flushes = float(torch.tensor([1e-310], dtype=torch.float64) * 1) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert flushes  # afterwards the thread does what it was told
    assert torch.equal(bits(got), want)


def test_more_sources_than_a_float64_holds_of_float16() -> None:
    x = torch.full((19,), 65504.0, dtype=torch.float16)
    inputs = [x, -x] * 4500 + [torch.full((19,), 2.0**-24, dtype=torch.float16)]
    assert bool((bits(fold(inputs)) == 1).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_and_no_byte_outside(dtype: torch.dtype) -> None:
    for count in (1, 5, 8, 16, 33, 77):
        inputs = samples(dtype, 3, count, count)
        want = fold(inputs)
        room = torch.full((count + 8,), 3.0).to(dtype)
        room[3 : 3 + count] = inputs[1]
        own = room[3 : 3 + count]
        assert _core.fold(own, [inputs[0], own, inputs[2]], SUM, None, 3)
        assert torch.equal(bits(own), bits(want))
        assert bool((room[:3] == 3).all())
        assert bool((room[3 + count :] == 3).all())


def test_only_floats() -> None:
    x = torch.ones(4, dtype=torch.int32)
    assert not _core.fold(x.clone(), [x, x], SUM, None, 2)
