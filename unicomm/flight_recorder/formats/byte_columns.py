"""Columns of numbers as bytes: many records that differ in a few numbers, made a column at a time.

A million records take seconds this way, and most of a minute one by one. A part of a record is either bytes
that all records share, or an array with one row of bytes for each record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Cells = npt.NDArray[np.uint8]  # records x bytes
Part = bytes | Cells
_SIGN, _POINT, _ZERO, _SPACE = b"-.0 "


def records(count: int, *parts: Part) -> list[bytes]:
    """Returns `count` records; each is the concatenation of its row of every part."""
    out = np.empty((count, width(*parts)), np.uint8)
    at = 0
    for part in parts:
        wide = width(part)
        out[:, at : at + wide] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += wide
    data = out.tobytes()
    return [data[i : i + at] for i in range(0, len(data), at)]


def width(*parts: Part) -> int:
    """Returns the number of bytes of one record of these parts."""
    return sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in parts)


def integers(values: Column) -> Cells:
    """Decimal digits, padded with leading spaces, which JSON allows."""
    return _digits(np.abs(values), values < 0, 1)


def thousandths(values: Column) -> Cells:
    """Integers divided by 1000, as decimal digits with three decimals: nanoseconds as microseconds."""
    magnitude = np.abs(values)
    whole = _digits(magnitude // 1000, values < 0, 1)
    point = np.full((len(values), 1), _POINT, np.uint8)
    return np.hstack([whole, point, _digits(magnitude % 1000, np.zeros(len(values), np.bool_), 3)])


def _digits(magnitude: Column, negative: Column, least: int) -> Cells:
    most = int(magnitude.max(initial=0))
    wide = max(len(str(most)), least)
    signed = bool(negative.any())
    out = np.full((len(magnitude), wide + signed), _SPACE, np.uint8)
    left = magnitude.copy()
    for at in range(out.shape[1] - 1, signed - 1, -1):
        shown = (left > 0) | (out.shape[1] - at <= least)
        out[:, at] = np.where(shown, left % 10 + _ZERO, _SPACE)
        left //= 10
    if signed:
        first = (out != _SPACE).argmax(axis=1) - 1
        rows = np.flatnonzero(negative)
        out[rows, first[rows]] = _SIGN
    return out


def varints(values: Column, wide: int = 0) -> Cells:
    """Protobuf's variable-length integers, all `wide` bytes long; 0: as long as the largest needs.

    Protobuf's readers accept an encoding that is longer than necessary.
    """
    bits = values.astype(np.uint64)
    wide = wide or max(1, -(-int(bits.max(initial=0)).bit_length() // 7))
    shifts = np.arange(0, 7 * wide, 7, dtype=np.uint64)
    out = (bits[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    out[:, :-1] |= 0x80
    return out


def fixed64(values: Column) -> Cells:
    """Integers or floats of eight bytes, little-endian."""
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"))).view(np.uint8).reshape(-1, 8)
