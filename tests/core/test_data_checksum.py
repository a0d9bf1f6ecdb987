"""The data checksum of the native core against its definition, by every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.instruction_sets import BEST, ISAS
from unicomm import _core

M = (1 << 64) - 1
WORD, LANE, JOIN = 0x85EBCA77, 0x9E3779B1, 0x9E3779B185EBCA87


@pytest.fixture(autouse=True)
def _best_isa() -> Iterator[None]:
    yield
    _core.set_fold_isa(BEST)


def rotated(x: int, n: int) -> int:
    return ((x << n) | (x >> (64 - n))) & M


def joined(h: int, x: int) -> int:
    return rotated(h ^ x, 27) * JOIN & M


def defined(pieces: list[bytes]) -> int:
    """The definition of csrc/checksum/data_checksum.hpp, step by step."""
    total = len(pieces)
    for piece in pieces:
        lanes = list(range(1, 33))
        padded = piece + bytes(-len(piece) % 256)
        for i in range(0, len(padded), 8):
            word = int.from_bytes(padded[i : i + 8], "little")
            k = i // 8 % 32
            lanes[k] = rotated((lanes[k] + word * WORD) & M, 31) * LANE & M
        h = len(piece) * JOIN & M
        for lane in lanes:
            h = joined(h, lane)
        total = joined(total, h)
    total = (total ^ (total >> 33)) * 0xFF51AFD7ED558CCD & M
    total = (total ^ (total >> 33)) * 0xC4CEB9FE1A85EC53 & M
    return total ^ (total >> 33)


def at(data: bytes, shift: int) -> torch.Tensor:
    """The bytes in memory that begins `shift` bytes after an aligned address."""
    room = torch.zeros(len(data) + shift + 1, dtype=torch.uint8)
    room[shift : shift + len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
        : len(data)
    ]
    return room[shift : shift + len(data)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 255, 256, 257, 511, 512, 1000, 4096 + 13])
def test_definition(isa: str, size: int) -> None:
    assert _core.set_fold_isa(isa)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    for shift in (0, 1, 7, 31):
        assert _core.checksum([at(data, shift)]) == defined([data])


@pytest.mark.parametrize("isa", ISAS)
def test_several_tensors_count_in_their_order(isa: str) -> None:
    assert _core.set_fold_isa(isa)
    parts = [b"abc", b"", b"abc", bytes(300)]
    assert _core.checksum([at(p, i) for i, p in enumerate(parts)]) == defined(parts)
    sums = [
        _core.checksum([at(p, 0) for p in some])
        for some in ([], [b""], [b"", b""], [b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"c", b"ab"], [b"abc\0"])
    ]
    assert len(set(sums)) == len(sums)


@settings(deadline=None, max_examples=200)
@given(
    data=st.binary(min_size=1, max_size=1500),
    shift=st.integers(0, 64),
    where=st.integers(0, 1 << 32),
    isa=st.sampled_from(ISAS),
)
def test_a_flipped_bit_is_found_wherever_it_is(data: bytes, shift: int, where: int, isa: str) -> None:
    assert _core.set_fold_isa(isa)
    tensor = at(data, shift)
    before = _core.checksum([tensor])
    byte, bit = where % len(data), where // len(data) % 8
    tensor[byte] ^= 1 << bit
    assert _core.checksum([tensor]) != before
    tensor[byte] ^= 1 << bit
    assert _core.checksum([tensor]) == before


def test_every_bit_of_a_stripe_and_its_tail() -> None:
    """All single flips give checksums that differ from the original and from each other."""
    for size in (256, 263):
        tensor = at(np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8).tobytes(), 5)
        sums = {_core.checksum([tensor])}
        for byte in range(size):
            for bit in range(8):
                tensor[byte] ^= 1 << bit
                sums.add(_core.checksum([tensor]))
                tensor[byte] ^= 1 << bit
        assert len(sums) == 8 * size + 1


@settings(deadline=None, max_examples=100)
@given(
    data=st.binary(min_size=8, max_size=900),
    other=st.binary(min_size=8, max_size=8),
    word=st.integers(0, 200),
)
def test_any_change_within_one_word_is_found(data: bytes, other: bytes, word: int) -> None:
    begin = word % (len(data) // 8) * 8
    changed = data[:begin] + other + data[begin + 8 :]
    assert (_core.checksum([at(data, 0)]) == _core.checksum([at(changed, 0)])) == (changed == data)


def test_regular_changes_of_floats_are_found() -> None:
    """Sign flips, negated and swapped elements, at all distances: what weak sums of words miss."""
    amounts = torch.randn(400).abs().unique()  # of elements that are alike, a swap changes nothing
    x = amounts[torch.randperm(len(amounts))[:200]] * (torch.randint(0, 2, (200,)) * 2 - 1)
    seen = {_core.checksum([x])}
    for i in range(0, 200, 7):
        for j in range(i + 1, 200):
            y = x.clone()
            y[[i, j]] = -y[[i, j]]
            z = x.clone()
            z[[i, j]] = x[[j, i]]
            seen |= {_core.checksum([y]), _core.checksum([z])}
    assert len(seen) == 1 + 2 * sum(199 - i for i in range(0, 200, 7))


def test_chance_of_a_collision() -> None:
    """Random data collide in no 32 bits of the checksum more often than random numbers do."""
    rng = np.random.default_rng(1)
    sums = [
        _core.checksum([torch.from_numpy(rng.integers(0, 256, 24, dtype=np.uint8))]) for _ in range(20000)
    ]
    assert len(set(sums)) == len(sums)
    for shift in (0, 16, 32):
        assert len({(s >> shift) & 0xFFFFFFFF for s in sums}) > len(sums) - 10
    ones = np.asarray([[s >> b & 1 for b in range(64)] for s in sums]).mean(axis=0)
    assert (abs(ones - 0.5) < 0.03).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 1 is not contiguous"):
        _core.checksum([torch.ones(2), torch.ones(4, 4).T])
    with pytest.raises(TypeError):
        _core.checksum(3)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2, torch.int64]
)
def test_element_types_are_bytes(dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % 2
    assert _core.checksum([raw.view(dtype)]) == _core.checksum([raw])
    assert _core.checksum([torch.nn.Parameter(torch.ones(3))]) == _core.checksum([torch.ones(3)])
