"""Many records that differ in a few numbers only, as bytes: a column of numbers at a time.

A million operations take seconds this way, and most of a minute one by one. A part of a record is either
the same for all, or a row of bytes for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from unicomm.profiler.operation_columns import Column, dense

Cells = npt.NDArray[np.uint8]  # records x bytes
Part = bytes | Cells
_SIGN, _POINT, _ZERO, _SPACE = b"-.0 "


def records(count: int, *parts: Part) -> list[bytes]:
    """`count` records of these parts, one after the other."""
    out = np.empty((count, width(*parts)), np.uint8)
    at = 0
    for part in parts:
        wide = width(part)
        out[:, at : at + wide] = np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part
        at += wide
    data = out.tobytes()
    return [data[i : i + at] for i in range(0, len(data), at)]


def width(*parts: Part) -> int:
    """Bytes of a record of these parts."""
    return sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in parts)


def alike(*columns: Column) -> Iterator[Column]:
    """The places of the rows that are the same in all these columns, of which there are some."""
    if not len(columns[0]):
        return
    kind = dense(*(column.astype(np.int64) for column in columns))
    yield from np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])


def integers(values: Column) -> Cells:
    """Decimal digits, with spaces before the shorter ones, which JSON allows."""
    return _digits(np.abs(values), values < 0, 1)


def thousandths(values: Column) -> Cells:
    """The same of nanoseconds as microseconds, with three decimals."""
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
    """Protobuf's integers, all of one length, which its readers take as well as the shortest."""
    bits = values.astype(np.uint64)
    wide = wide or max(1, -(-int(bits.max(initial=0)).bit_length() // 7))
    shifts = np.arange(0, 7 * wide, 7, dtype=np.uint64)
    out = (bits[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    out[:, :-1] |= 0x80
    return out


def eights(values: Column) -> Cells:
    """Numbers of eight bytes, the lowest first."""
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"))).view(np.uint8).reshape(-1, 8)
