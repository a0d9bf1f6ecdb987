"""Operations on hollow tensors whose result is more than its layout, or whose layout depends on known values.

Each answer takes the arguments of its operation, and is None if the operation is answered as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..values import reads
from .memory import is_hollow, is_large, make_up
from .rules import NotKnownError

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _number(tensor: torch.Tensor) -> Any:
    """A number of Python."""
    if not is_hollow(tensor):
        return None
    reads.note("a number", reads.HOLLOW)
    return make_up(torch.empty((), dtype=tensor.dtype)).item()


def _equal(one: torch.Tensor, other: torch.Tensor) -> Any:
    """Whether two tensors are equal: they are, if they might be."""
    if not (is_hollow(one) or is_hollow(other)):
        return None
    reads.note("a branch", reads.HOLLOW)
    return one.shape == other.shape


def _histogram(tensor: torch.Tensor, bins: int = 100, *_: Any) -> Any:
    """How many elements are in each bin: equally many, so that the counts have the right sum."""
    if not is_hollow(tensor) or is_large((bins,), (1,), tensor.dtype):
        return None
    return _balanced(tensor, bins, tensor.dtype)


def _counts(tensor: torch.Tensor, weights: Any = None, minlength: int = 0) -> Any:
    """How often each number occurs: equally often, up to the least length that was asked for."""
    if not is_hollow(tensor) or weights is not None:
        return None
    if not minlength:
        raise NotKnownError("the length of bincount's result", "give it a minlength")
    return _balanced(tensor, minlength, torch.int64)


def _balanced(tensor: torch.Tensor, bins: int, dtype: torch.dtype) -> torch.Tensor:
    each, rest = divmod(tensor.numel(), bins)
    found = torch.tensor([each + (at < rest) for at in range(bins)], dtype=dtype)
    reads.mark([found], reads.HOLLOW)
    return found


ANSWERS: Mapping[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.equal.default: _equal,
    aten.histc.default: _histogram,
    aten.bincount.default: _counts,
}


def _by_position(args: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments with masks whose values are known as the positions that they select."""
    tensor, indices, *more = args
    if not is_hollow(tensor):
        return args
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS or is_hollow(index):
            found.append(index)
        else:
            found += index.nonzero().unbind(1)
    return (tensor, found, *more)


#: Operations whose arguments change before they are answered.
PREPARES: Mapping[Any, Callable[[Sequence[Any]], Sequence[Any]]] = dict.fromkeys(
    (aten.index.Tensor, aten.index_put.default, aten.index_put_.default), _by_position
)
