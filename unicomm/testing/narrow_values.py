"""Values of narrow floats whose reduction is wrong if anything between the ranks' elements and the result is
rounded, or overflows.

Reductions in float32 are exact on them, whatever the order and however the ranks are grouped, so that every
backend has to give the same bits.
"""

from __future__ import annotations

import torch

from unicomm.comms.operations.reduction import RedOpType, ReduceOp

#: The element types that are accumulated in float32.
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
#: The reductions in which they are rounded.
ROUNDED = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM(0.5), ReduceOp.PRODUCT)


def narrow_values(
    rank: int, size: int, count: int, dtype: torch.dtype, op: ReduceOp, salt: int
) -> torch.Tensor:
    """What `rank` of up to 8 ranks sends."""
    i = torch.arange(count, dtype=torch.int64)
    place = (rank + i + salt) % size  # of this rank among all, different for each element
    make = _factors if op.type is RedOpType.PRODUCT else _terms
    return make(i, place, size, dtype).to(dtype)


def _terms(i: torch.Tensor, place: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    # bfloat16 has the range of float32, in which sums of all ranks must not overflow.
    large = info.max / 16 if dtype is torch.bfloat16 else info.max
    # Two ranks' sum overflows, then two others' takes it back.
    cancels = torch.where(place % 4 < 2, large, -large).double()
    # Half a unit in the last place of the one: lost if it is rounded before it meets another half.
    halves = torch.where(place == 0, 1.0, info.eps / 2).double()
    overflows = torch.full_like(halves, large)  # AVG still is a number
    return torch.stack([cancels, halves, -halves, overflows])[i % 4, torch.arange(len(i))]


def _factors(i: torch.Tensor, place: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    large = 2.0 ** min(12, int(torch.tensor(info.max).log2()) - 1)
    cancels = torch.where(place % 4 < 2, large, 1 / large).double()
    bits = min(7, -int(torch.tensor(info.eps).log2()))
    inexact = torch.where(place < 3, 2.0 - 2.0**-bits, 1.0).double()
    return torch.stack([cancels, inexact, -inexact])[i % 3, torch.arange(len(i))]
