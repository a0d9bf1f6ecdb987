"""The native reductions against torch's and Python's arithmetic, by every instruction set of this machine."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.instruction_sets import BEST, ISAS
from unicomm import _core
from unicomm.comms.operations.dtypes import DTYPES, OTHER, code_of
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not

NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATS = [torch.float64, torch.float32, *NARROW]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [dtype for dtype, info in DTYPES.items() if info.kind == "int"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FACTORS = [2.0, -3.0, 0.5, 1.0, -0.25, 7.0, 0.1, -1.5]
INTEGER_FACTORS = [2.0, -3.0, 5.0, 1.0, -1.0, 7.0, 300.0, -(2.0**40)]
CASES = [
    pytest.param(dtype, op, id=f"{info.name}-{op.name}")
    for dtype, info in DTYPES.items()
    for op in RedOpType
    if why_not(ReduceOp(op, 1.0 if op == RedOpType.PREMUL_SUM else None), dtype) is None
]


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    _core.set_fold_isa(BEST)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, every NaN as the same one."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(torch.uint8 if tensor.dtype == torch.bool else BITS[tensor.element_size()])
    if tensor.is_floating_point():
        nan = torch.isnan(tensor.to(torch.float64))
        bits = bits.masked_fill(nan, 127 if tensor.element_size() == 1 else -1)
    return bits


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert got.dtype == expected.dtype
    wrong = (bits_of(got) != bits_of(expected)).flatten().nonzero().flatten()
    assert wrong.numel() == 0, f"{what}: {wrong.numel()} elements differ, the first at {int(wrong[0])}"


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a dtype of at most 16 bits."""
    return torch.arange(2 ** (8 * dtype.itemsize)).to(BITS[dtype.itemsize]).view(dtype)


def sample(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Ordinary numbers, every third one of random bits: infinities, NaN and subnormals are among them."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    if dtype in COMPLEX:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.view_as_complex(sample(part, 2 * count, seed).reshape(count, 2))
    size = dtype.itemsize
    raw = rng.integers(0, 256, (count + 1) * size, dtype=np.uint8)
    values = torch.from_numpy(raw).view(dtype)[:count]
    if dtype.is_floating_point:
        usual = torch.from_numpy(rng.standard_normal(count) * 4).to(dtype)
        usual.view(BITS[size])[::3] = values.view(BITS[size])[::3]
        return usual
    return values


def fold(
    op: RedOpType,
    inputs: list[torch.Tensor],
    factors: list[float] | None = None,
    n_avg: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(inputs[0]) if out is None else out
    assert _core.fold(out, inputs, int(op), factors, len(inputs) if n_avg is None else n_avg)
    return out


def fold_everywhere(
    op: RedOpType, inputs: list[torch.Tensor], factors: list[float] | None = None
) -> torch.Tensor:
    """The fold by the best instruction set, after checking that all others give the same bits."""
    best = fold(op, inputs, factors)
    for isa in ISAS[1:]:
        assert _core.set_fold_isa(isa)
        assert_same(fold(op, inputs, factors), best, isa)
    _core.set_fold_isa(BEST)
    return best


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's conversion; before 2.13 it made NaN of what is too large for float8_e4m3fn."""
    return (tensor.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else tensor).to(dtype)


def expected_float(op: RedOpType, inputs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    dtype = inputs[0].dtype
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    steps: dict[RedOpType, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
    steps = {RedOpType.PRODUCT: torch.mul, RedOpType.MIN: torch.minimum, RedOpType.MAX: torch.maximum}
    terms = [tensor.to(wide) for tensor in inputs]
    if op == RedOpType.PREMUL_SUM:
        terms = [term * torch.tensor(factor, dtype=wide) for term, factor in zip(terms, factors, strict=True)]
    acc = terms[0].clone()
    for term in terms[1:]:
        acc = steps.get(op, torch.add)(acc, term)
    return rounded(acc / len(inputs) if op == RedOpType.AVG else acc, dtype)


def expected_complex(op: RedOpType, inputs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    parts = [torch.view_as_real(tensor) for tensor in inputs]
    if op != RedOpType.PRODUCT:
        return torch.view_as_complex(expected_float(op, parts, factors))
    real, imag = parts[0].unbind(-1)
    for part in parts[1:]:
        c, d = part.unbind(-1)
        real, imag = real * c - imag * d, real * d + imag * c
    return torch.complex(real, imag)


def expected_bool(op: RedOpType, inputs: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(inputs)
    if op in (RedOpType.SUM, RedOpType.MAX, RedOpType.BOR):
        return stacked.any(0)
    return stacked.sum(0) % 2 == 1 if op == RedOpType.BXOR else stacked.all(0)


def expected_integer(
    op: RedOpType, inputs: list[torch.Tensor], factors: list[float], n_avg: int
) -> torch.Tensor:
    """Python's unbounded integers, cut to the dtype at the end (the operations allow that)."""
    steps: dict[RedOpType, Callable[..., Any]] = {
        RedOpType.PRODUCT: np.multiply,
        RedOpType.MIN: np.minimum,
        RedOpType.MAX: np.maximum,
        RedOpType.BAND: np.bitwise_and,
        RedOpType.BOR: np.bitwise_or,
        RedOpType.BXOR: np.bitwise_xor,
    }
    kind = inputs[0].numpy().dtype
    terms = [tensor.numpy().astype(object) for tensor in inputs]
    if op == RedOpType.PREMUL_SUM:
        terms = [term * int(factor) for term, factor in zip(terms, factors, strict=True)]
    acc: Any = terms[0]
    for term in terms[1:]:
        acc = steps.get(op, np.add)(acc, term)
    span, lowest = 2 ** (8 * kind.itemsize), int(np.iinfo(kind).min)
    wrapped = (acc - lowest) % span + lowest
    if op == RedOpType.AVG:
        wrapped = abs(wrapped) // n_avg * np.where(wrapped < 0, -1, 1).astype(object)
    return torch.from_numpy(wrapped.astype(kind))


def expected(op: RedOpType, inputs: list[torch.Tensor], factors: list[float]) -> torch.Tensor:
    kind = DTYPES[inputs[0].dtype].kind
    if kind == "float":
        return expected_float(op, inputs, factors)
    if kind == "complex":
        return expected_complex(op, inputs, factors)
    return expected_bool(op, inputs) if kind == "bool" else expected_integer(op, inputs, factors, len(inputs))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_every_dtype_and_operation(dtype: torch.dtype, op: RedOpType) -> None:
    for n, count in itertools.product((1, 2, 3, 5, 8), (0, 1, 7, 64, 1000, 4099)):
        inputs = [sample(dtype, count, seed=100 * n + k) for k in range(n)]
        factors = (INTEGER_FACTORS if DTYPES[dtype].kind == "int" else FACTORS)[:n]
        got = fold_everywhere(op, inputs, factors if op == RedOpType.PREMUL_SUM else None)
        want = expected(op, inputs, factors)
        if op in (RedOpType.MIN, RedOpType.MAX) and dtype.is_floating_point:
            # Which of -0.0 and 0.0 torch returns depends on the place; see test_ties_keep_the_first.
            got, want = got.to(torch.float64), want.to(torch.float64)
            zero = want == 0
            assert bool((got[zero] == 0).all())
            assert_same(got.masked_fill(zero, 0), want.masked_fill(zero, 0), (n, count))
        else:
            assert_same(got, want, (n, count))


def test_defined_exactly_where_the_python_side_says() -> None:
    for dtype, op in itertools.product(DTYPES, RedOpType):
        factor = 1.0 if op == RedOpType.PREMUL_SUM else None
        assert _core.fold_defined(code_of(dtype), int(op)) == (why_not(ReduceOp(op, factor), dtype) is None)
    assert not any(_core.fold_defined(code, int(op)) for code in (0, OTHER, OTHER + 1) for op in RedOpType)


def test_undefined_leaves_out_alone() -> None:
    out, x = torch.full((5,), 3.0), torch.ones(5)
    assert not _core.fold(out, [x, x], int(RedOpType.BXOR))
    assert_same(out, torch.full((5,), 3.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_survives_conversion(dtype: torch.dtype, isa: str) -> None:
    _core.set_fold_isa(isa)
    x = patterns(dtype)
    assert_same(fold(RedOpType.SUM, [x]), x)
    assert_same(fold(RedOpType.AVG, [x]), x)
    assert_same(fold(RedOpType.PREMUL_SUM, [x], [1.0]), x)
    assert_same(fold(RedOpType.MAX, [x, x]), x)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding(dtype: torch.dtype) -> None:
    """All patterns against many others, and by factors whose products need all bits of a float32."""
    x = patterns(dtype)
    others = x if x.numel() == 256 else x[torch.arange(0, 65536, 2731) * 7 % 65536]
    for other in others:
        y = other.reshape(1).expand_as(x).contiguous()
        assert_same(fold_everywhere(RedOpType.SUM, [x, y]), rounded(x.float() + y.float(), dtype), other)
    for factor in (1 / 3, 1.0 + 2**-11, 0.49999, 1.5 * 2**-7, 2.0**-14, 1e5, -0.1, float("nan"), 1e300):
        want = rounded(x.float() * torch.tensor(factor, dtype=torch.float32), dtype)
        assert_same(fold_everywhere(RedOpType.PREMUL_SUM, [x], [factor]), want, factor)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_conversion_does_not_depend_on_the_thread_flushing_denormals(dtype: torch.dtype, isa: str) -> None:
    _core.set_fold_isa(isa)
    x = patterns(dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = fold(RedOpType.AVG, [x])
    finally:
        torch.set_flush_denormal(False)
    assert_same(got, x)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_ties_keep_the_first(dtype: torch.dtype, isa: str) -> None:
    _core.set_fold_isa(isa)
    positive, negative = torch.zeros(37).to(dtype), (-torch.zeros(37)).to(dtype)
    for op in (RedOpType.MIN, RedOpType.MAX):
        assert_same(fold(op, [positive, negative]), positive)
        assert_same(fold(op, [negative, positive]), negative)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_overflow(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    overflow = largest if dtype == torch.float8_e4m3fn else float("inf")
    x, minus_x = torch.full((40,), largest).to(dtype), torch.full((40,), -largest).to(dtype)
    assert_same(fold_everywhere(RedOpType.SUM, [x, x]), torch.full((40,), overflow).to(dtype))
    assert_same(fold_everywhere(RedOpType.SUM, [minus_x, minus_x]), torch.full((40,), -overflow).to(dtype))
    if dtype != torch.bfloat16:  # float32 has room for the sum on the way, but no more than bfloat16
        assert_same(fold_everywhere(RedOpType.SUM, [x, x, minus_x]), x)


def test_folds_from_left_to_right() -> None:
    big, small = torch.full((99,), 2.0**80), torch.ones(99)
    assert_same(fold_everywhere(RedOpType.SUM, [big, -big, small]), small)
    assert_same(fold_everywhere(RedOpType.SUM, [small, big, -big]), torch.zeros(99))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_round_once(dtype: torch.dtype) -> None:
    one = torch.ones(50).to(dtype)
    tiny = (one.float() * 2.0**-9).to(dtype)  # lost in each single addition to 1, but not in all together
    steps = [one] + [tiny] * 256
    assert_same(fold_everywhere(RedOpType.SUM, steps), torch.full((50,), 1.5).to(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_divide_by_large_numbers_of_ranks(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    edge = torch.tensor([limits.min, limits.min + 1, 0, 1, 99, 100, limits.max - 1, limits.max], dtype=dtype)
    for n_avg in (1, 2, 100, 128, 300, 70_000):
        want = expected_integer(RedOpType.AVG, [edge], [], n_avg)
        for isa in ISAS:
            assert _core.set_fold_isa(isa)
            assert_same(fold(RedOpType.AVG, [edge], n_avg=n_avg), want, (isa, n_avg))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("factor", [-1.0, 2.0**63, -(2.0**63), 2.0**64 + 2.0**30, 2.0**31 + 1])
def test_integer_factors_wrap(dtype: torch.dtype, factor: float) -> None:
    x = sample(dtype, 70, seed=3)
    got = fold_everywhere(RedOpType.PREMUL_SUM, [x, x], [factor, 1.0])
    assert_same(got, expected_integer(RedOpType.PREMUL_SUM, [x, x], [factor, 1.0], 0))


@pytest.mark.parametrize("isa", ISAS)
def test_bytes_that_are_not_0_or_1_are_true(isa: str) -> None:
    _core.set_fold_isa(isa)
    x = torch.arange(256, dtype=torch.uint8)
    true = x != 0
    for op in (RedOpType.SUM, RedOpType.PRODUCT, RedOpType.BXOR):
        assert torch.equal(fold(op, [x.view(torch.bool)]).view(torch.uint8), true.to(torch.uint8))
    both = fold(RedOpType.BXOR, [x.view(torch.bool), x.view(torch.bool)])
    assert torch.equal(both.view(torch.uint8), torch.zeros(256, dtype=torch.uint8))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_in_place(dtype: torch.dtype, op: RedOpType) -> None:
    factors = INTEGER_FACTORS[:5] if op == RedOpType.PREMUL_SUM else None
    for isa, n, count in itertools.product(ISAS, (1, 2, 5), (3, 517)):
        assert _core.set_fold_isa(isa)
        inputs = [sample(dtype, count, seed=k) for k in range(n)]
        want = fold(op, inputs, factors and factors[:n])
        for k in range(n):
            aliased = [tensor.clone() for tensor in inputs]
            got = fold(op, aliased, factors and factors[:n], out=aliased[k])
            assert_same(got, want, (isa, n, k))
            for i in set(range(n)) - {k}:
                assert_same(aliased[i], inputs[i], (isa, n, k))


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_any_alignment_and_no_byte_outside(dtype: torch.dtype, op: RedOpType) -> None:
    for isa, count in itertools.product(ISAS, (1, 77, 300)):
        assert _core.set_fold_isa(isa)
        inputs = [sample(dtype, count, seed=k) for k in range(3)]
        factors = INTEGER_FACTORS[:3] if op == RedOpType.PREMUL_SUM else None
        want = fold(op, inputs, factors)
        moved = []
        for shift, tensor in zip((1, 3, 5), inputs, strict=True):
            memory = bytearray(shift) + tensor.view(torch.uint8).numpy().tobytes()
            moved.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=shift))
        memory = bytearray(b"\xa5" * (count * dtype.itemsize + 200))
        got = torch.frombuffer(memory, dtype=dtype, count=count, offset=101)
        assert_same(fold(op, moved, factors, out=got), want, (isa, count))
        assert set(memory[:101] + memory[101 + count * dtype.itemsize :]) == {0xA5}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool], ids=str
)
def test_reads_and_writes_nothing_beyond_the_end(dtype: torch.dtype, isa: str) -> None:
    """The operands end where memory that may not be touched begins."""
    _core.set_fold_isa(isa)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    assert mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    for count in (1, 3, 17, 33, 100):
        tail = torch.frombuffer(memory, dtype=dtype, count=count, offset=page - count * dtype.itemsize)
        x, y = sample(dtype, count, seed=1), sample(dtype, count, seed=2)
        tail.copy_(x)
        assert_same(fold(RedOpType.MAX, [tail, y], out=tail), fold(RedOpType.MAX, [x, y]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int16], ids=str)
def test_pieces_give_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    inputs = [sample(dtype, 1000, seed=k) for k in range(4)]
    whole = fold(RedOpType.SUM, inputs)
    for cut in (1, 13, 64, 250, 999):
        front = fold(RedOpType.SUM, [tensor[:cut] for tensor in inputs])
        back = fold(RedOpType.SUM, [tensor[cut:] for tensor in inputs])
        assert_same(torch.cat([bits_of(front), bits_of(back)]), bits_of(whole), cut)


def test_isa_is_chosen_by_name() -> None:
    for isa in ISAS:
        assert _core.set_fold_isa(isa)
        assert _core.fold_isa() == isa
    assert not _core.set_fold_isa("abacus")
    assert _core.fold_isa() == ISAS[-1]


def test_refuses_what_does_not_fit() -> None:
    out, x = torch.zeros(8), torch.ones(8)
    for inputs, op, factors, n_avg, message in [
        ([], RedOpType.SUM, None, 0, "no inputs"),
        ([x, torch.ones(7)], RedOpType.SUM, None, 0, "input 1 has 7 elements and out 8"),
        ([x.double()], RedOpType.SUM, None, 0, "differ in dtype"),
        ([torch.ones(16)[::2]], RedOpType.SUM, None, 0, "input 0 is not contiguous"),
        ([torch.ones(8, device="meta")], RedOpType.SUM, None, 0, "not on the CPU"),
        ([x, x], RedOpType.PREMUL_SUM, [1.0], 0, "2 inputs got 1 factors"),
        ([x, x], RedOpType.PREMUL_SUM, None, 0, "2 inputs got 0 factors"),
        ([x], RedOpType.AVG, None, 0, "n_avg=0"),
        ([x], 11, None, 0, "n_avg=0"),
        ([x], 12, None, 0, "12 is no reduce operation"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.fold(out, inputs, int(op), factors, n_avg)
    memory = torch.zeros(9)
    with pytest.raises(ValueError, match="input 0 overlaps out partly"):
        _core.fold(memory[1:], [memory[:8]], int(RedOpType.SUM))
    assert_same(out, torch.zeros(8))
