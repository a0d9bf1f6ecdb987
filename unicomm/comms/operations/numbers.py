"""Checks of numbers that users pass: whole numbers in a range, and the sizes of a tensor.

They raise `InvalidArgumentError` on the calling rank, before anything is issued: a number that reaches the
native core and does not fit there would fail in the middle of an operation, which breaks the communicator.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from unicomm.comms.errors import InvalidArgumentError

#: Bytes that no process can address, and so no allocation has.
ADDRESSABLE = 1 << 47
#: The values of a word of 64 bits, signed or not.
WORD = (-(1 << 63), (1 << 64) - 1)


def as_index(value: Any) -> int:
    """`operator.index`, which takes no bool either."""
    if isinstance(value, bool):
        raise TypeError("a bool is no number")
    return operator.index(value)


def whole_number(what: str, value: Any, least: int, most: int) -> int:
    """`value` as an int from `least` to `most`. A bool, a float and a string are none."""
    try:
        number = as_index(value)
    except TypeError:
        raise InvalidArgumentError(f"{what}={value!r} is no whole number", hint="pass an int") from None
    if not least <= number <= most:
        raise InvalidArgumentError(
            f"{what}={_short(number)} is out of range", hint=f"pass a number from {least} to {most}"
        )
    return number


def tensor_shape(
    size: Sequence[Any], dtype: torch.dtype | None, least: int = 0, most: int = ADDRESSABLE
) -> tuple[torch.Size, torch.dtype, int]:
    """The shape, dtype and bytes of a tensor whose sizes are given as to `torch.empty`.

    `least`: of elements. `most`: bytes, of which the tensor has fewer.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"dtype={dtype!r} is no dtype", hint="pass e.g. torch.float32")
    listed = len(size) == 1 and isinstance(size[0], Sequence) and not isinstance(size[0], str)
    given: Any = size[0] if listed else size
    numbers = [whole_number(f"size[{i}]", n, 0, (1 << 63) - 1) for i, n in enumerate(given)]
    count = math.prod(numbers)
    if count < least:
        raise InvalidArgumentError(
            f"a symmetric tensor of size {tuple(numbers)}", hint="it needs at least one element"
        )
    if count * dtype.itemsize >= most:
        raise InvalidArgumentError(
            f"a tensor of size {tuple(numbers)} takes more bytes than a process can address",
            hint="make it smaller",
        )
    return torch.Size(numbers), dtype, count * dtype.itemsize


def _short(number: int) -> str:
    """The number, or what is known of one that is too long to be printed."""
    return str(number) if number.bit_length() <= 128 else f"<a number of {number.bit_length()} bits>"
