"""Wire formats of the native core against their definition, by every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.instruction_sets import BEST, ISAS
from unicomm import _core
from unicomm.comms.execution.device import encode as device_encode

BF16, E4M3, INT8, MXFP8 = 1, 2, 3, 4
BLOCKS = {E4M3: 128, INT8: 32, MXFP8: 32}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COUNTS = (1, 7, 31, 32, 33, 127, 128, 129, 1000, 4099)

#: The numbers of E4M3 by their code: sign, four bits of exponent with bias 7, three of fraction; no infinity.
E4M3_VALUES = np.array(
    [
        (8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9
        for code in range(127)  # 127 is NaN
    ]
)


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    _core.set_fold_isa(BEST)


def encode(x: torch.Tensor, fmt: int, factor: float = 1.0, key: int | None = None) -> torch.Tensor:
    """The bytes by the best instruction set, after checking that all others, and torch, give the same."""
    outs = []
    for isa in ISAS:
        assert _core.set_fold_isa(isa)
        out = torch.zeros(_core.wire_bytes(fmt, x.numel()), dtype=torch.uint8)
        _core.wire_encode(out, x, fmt, factor, key is not None, key or 0)
        outs.append(out)
    by_torch = torch.zeros_like(outs[0])
    device_encode.wire_encode(by_torch, x, device_encode.WireFormat(fmt), factor, key is not None, key or 0)
    if not (fmt == BF16 and x.isnan().any()):  # whose NaN has other bits
        outs.append(by_torch)
    _core.set_fold_isa(BEST)
    for out in outs:
        assert torch.equal(out, outs[0])
    return outs[0]


def decode(data: torch.Tensor, fmt: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    outs = []
    for isa in ISAS:
        assert _core.set_fold_isa(isa)
        out = torch.full((count,), 7.0, dtype=dtype)
        _core.wire_decode(out, data, fmt)
        outs.append(out)
    _core.set_fold_isa(BEST)
    by_torch = torch.full((count,), 7.0, dtype=dtype)
    device_encode.wire_decode(by_torch, data, device_encode.WireFormat(fmt))
    for out in (*outs, by_torch):
        assert torch.equal(out.isnan(), outs[0].isnan())
        assert torch.equal(out.nan_to_num(nan=0.0).view(-1), outs[0].nan_to_num(nan=0.0))
    return outs[0]


def definition(x: np.ndarray, fmt: int) -> np.ndarray:
    """What encoding and decoding makes of float32 numbers, in float64, which is exact here."""
    out = np.empty(len(x))
    most = 127 / 64 if fmt == INT8 else 448.0
    for at in range(0, len(x), BLOCKS[fmt]):
        block = x[at : at + BLOCKS[fmt]].astype(np.float64)
        if not np.isfinite(block).all():
            out[at : at + BLOCKS[fmt]] = np.nan
            continue
        exponent = -121 if fmt == INT8 else -127
        while np.abs(block).max() > most * 2.0**exponent and exponent < 127:
            exponent += 1
        scaled = np.abs(block) / 2.0**exponent
        if fmt == INT8:
            rounded = np.minimum(np.round(scaled * 64), 127) / 64  # numpy rounds half to even
        else:
            above = np.searchsorted(E4M3_VALUES, scaled).clip(1, 126)
            low, high = E4M3_VALUES[above - 1], E4M3_VALUES[above]
            up = (scaled - low > high - scaled) | ((scaled - low == high - scaled) & (above % 2 == 0))
            rounded = np.where(up, high, low)
        out[at : at + BLOCKS[fmt]] = np.copysign(rounded, block) * 2.0**exponent
    return out


def greatest(x: np.ndarray, fmt: int) -> np.ndarray:
    """The greatest magnitude of each element's block."""
    blocks = [np.abs(x[at : at + BLOCKS[fmt]]) for at in range(0, len(x), BLOCKS[fmt])]
    return np.concatenate([np.full(len(b), b.max()) for b in blocks])


def samples(count: int, seed: int) -> np.ndarray:
    """Numbers alike in size, far apart, tiny, huge, halfway between two codes, and zeros."""
    rng = np.random.default_rng(seed)
    kinds = [
        rng.standard_normal(count),
        rng.standard_normal(count) * np.exp2(rng.uniform(-20, 0, count)),
        rng.standard_normal(count) * 2.0**-130,
        rng.uniform(-1, 1, count) * 3.4e38,
        rng.choice(E4M3_VALUES, count) + rng.choice(np.diff(E4M3_VALUES), count) / 2,
        rng.integers(-254, 255, count) / 128,
        np.where(rng.random(count) < 0.5, 0.0, -0.0),
    ]
    with np.errstate(over="ignore"):
        mixed = np.choose(np.repeat(rng.integers(0, 7, -(-count // 64)), 64)[:count], kinds)
        return mixed.astype(np.float32)


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("count", COUNTS)
def test_blocks_are_rounded_as_defined(fmt: int, count: int) -> None:
    for seed in range(8):
        x = samples(count, seed)
        data = encode(torch.from_numpy(x), fmt)
        assert data.numel() == count + -(-count // BLOCKS[fmt])
        with np.errstate(over="ignore"):
            want = definition(x, fmt).astype(np.float32)
        assert np.array_equal(decode(data, fmt, count).numpy(), want)


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(st.lists(floats, min_size=1, max_size=200), st.sampled_from(sorted(BLOCKS)))
def test_error_bounds(numbers: list[float], fmt: int) -> None:
    x = np.array(numbers, dtype=np.float32)
    back = decode(encode(torch.from_numpy(x), fmt), fmt, len(x)).numpy().astype(np.float64)
    wide, most = x.astype(np.float64), greatest(x.astype(np.float64), fmt)
    if fmt == INT8:
        bound = np.maximum(most / 127, 2.0**-128)
    else:
        bound = np.maximum(np.abs(wide) / 16, np.maximum(most / 229376, 2.0**-137))
    overflows = np.abs(wide) * (17 / 16) >= 2.0**128  # which may become infinite
    assert (overflows | (np.abs(back - wide) <= bound)).all()
    assert np.array_equal(back, definition(x, fmt).astype(np.float32))


@settings(max_examples=100, deadline=None)
@given(st.lists(floats, min_size=1, max_size=70), st.sampled_from([BF16, *BLOCKS]), st.integers(0, 2**64 - 1))
def test_stochastic_rounding_goes_to_a_neighbour(numbers: list[float], fmt: int, key: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    back = decode(encode(x, fmt, key=key), fmt, len(x)).numpy().astype(np.float64)
    wide = x.numpy().astype(np.float64)
    if fmt == BF16:
        bound = np.maximum(np.abs(wide) / 128, 2.0**-133)
    elif fmt == INT8:
        bound = np.maximum(2 * greatest(wide, fmt) / 127, 2.0**-127)
    else:
        bound = np.maximum(np.abs(wide) / 8, np.maximum(greatest(wide, fmt) / 114688, 2.0**-136))
    overflows = np.abs(wide) * (9 / 8) >= 2.0**128
    assert (overflows | (np.abs(back - wide) <= bound)).all()


@pytest.mark.parametrize("fmt", [BF16, *BLOCKS])
def test_stochastic_rounding_is_right_on_average_and_follows_its_key(fmt: int) -> None:
    x = torch.linspace(-0.997, 0.983, 257)
    total = torch.zeros(257, dtype=torch.float64)
    for key in range(400):
        total += decode(encode(x, fmt, key=key << 32 | key * 2654435761 % 2**32), fmt, 257).double()
    error = (total / 400 - x.double()).abs()
    step = {BF16: 2.0**-8, INT8: 2.0**-6}.get(fmt, 2.0**-4)
    assert float(error.max()) < step / 4  # six standard deviations of the mean of 400 are 0.15 steps
    assert float(error.mean()) < step / 20
    one, again, other = (encode(x, fmt, key=key) for key in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    exact = torch.tensor([1.0, -0.5, 0.25, 0.0] * 20)
    assert torch.equal(decode(encode(exact, fmt, key=9), fmt, 80), exact)


@pytest.mark.parametrize("fmt", BLOCKS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(fmt: int, bad: float) -> None:
    block = BLOCKS[fmt]
    x = torch.ones(3 * block + 5)
    x[block + 3] = bad
    back = decode(encode(x, fmt), fmt, x.numel())
    nan = torch.zeros(x.numel(), dtype=torch.bool)
    nan[block : 2 * block] = True
    assert torch.equal(back.isnan(), nan)
    assert bool((back[~nan] == 1).all())
    assert back[nan].view(torch.int32).unique().tolist() == [0x7FC00000]


def test_bfloat16_is_that_of_torch() -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 4099, dtype=np.uint32).view(np.float32))
    back = decode(encode(x, BF16), BF16, x.numel())
    want = x.bfloat16().float()
    assert torch.equal(back.isnan(), want.isnan())
    assert torch.equal(back.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [BF16, *BLOCKS])
def test_narrow_types_are_converted_first_and_rounded_once_afterwards(dtype: torch.dtype, fmt: int) -> None:
    for count in COUNTS:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
        data = encode(x, fmt)
        assert torch.equal(data, encode(x.float(), fmt))
        assert torch.equal(decode(data, fmt, count, dtype), decode(data, fmt, count).to(dtype))
        assert torch.equal(encode(x, fmt, 2.0), encode(x.float() * 2, fmt))


@pytest.mark.parametrize("fmt", [BF16, *BLOCKS])
def test_adding_and_no_byte_outside(fmt: int) -> None:
    for count in COUNTS:
        x = torch.randn(count, generator=torch.Generator().manual_seed(count))
        data = encode(x, fmt)
        room = torch.full((count + 8,), 3.0)
        own = room[3 : 3 + count]
        want = own + decode(data, fmt, count)
        _core.wire_decode(own, data, fmt, True)
        assert torch.equal(own, want)
        assert bool((room[:3] == 3).all())
        assert bool((room[3 + count :] == 3).all())
        bytes_ = torch.full((data.numel() + 9,), 77, dtype=torch.uint8)
        _core.wire_encode(bytes_[5:-4], x, fmt)
        assert torch.equal(bytes_[5:-4], data)
        assert bytes_[:5].tolist() == [77] * 5
        assert bytes_[-4:].tolist() == [77] * 4


def test_threads_that_flush_denormals_get_the_same_bits() -> None:
    x = torch.randn(500) * 2.0**-128
    want = [(encode(x, fmt), decode(encode(x, fmt), fmt, 500)) for fmt in BLOCKS]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for fmt, (data, back) in zip(BLOCKS, want, strict=True):
            out, got = torch.empty_like(data), torch.empty_like(back)
            _core.wire_encode(out, x, fmt)
            _core.wire_decode(got, data, fmt)
            assert torch.equal(out, data)
            assert torch.equal(got.view(torch.int32), back.view(torch.int32))
    finally:
        torch.set_flush_denormal(False)


def test_what_does_not_fit_together_is_refused() -> None:
    x, out = torch.ones(40), torch.empty(42, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no format"):
        _core.wire_encode(out, x, 9)
    with pytest.raises(ValueError, match="need 41 bytes, not 42"):
        _core.wire_encode(out, x, E4M3)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        _core.wire_encode(out, x.double(), INT8)
    with pytest.raises(ValueError, match="not contiguous"):
        _core.wire_encode(out, torch.ones(80)[::2], INT8)
    with pytest.raises(ValueError, match="only float32 can be added to"):
        _core.wire_decode(x.half(), out, INT8, True)
    room = torch.empty(200, dtype=torch.uint8)
    with pytest.raises(ValueError, match="memory in common"):
        _core.wire_encode(room[:42], room[40:].view(torch.float32), INT8)


@pytest.mark.parametrize("fmt", [BF16, E4M3, INT8, MXFP8])
def test_chunks_have_the_random_bits_of_the_whole(fmt: int) -> None:
    x, key, cut = torch.randn(1000), 0x123456789ABC, 384
    whole = decode(encode(x, fmt, key=key), fmt, 1000)
    for isa in ISAS:
        assert _core.set_fold_isa(isa)
        for core in (_core, device_encode):
            found = []
            for first, part in ((0, x[:cut]), (cut, x[cut:])):
                out = torch.zeros(_core.wire_bytes(fmt, part.numel()), dtype=torch.uint8)
                core.wire_encode(out, part, device_encode.WireFormat(fmt), 1.0, True, key, None, first)
                found.append(decode(out, fmt, part.numel()))
            assert torch.equal(torch.cat(found), whole)
