"""Reductions of tensors on a device that the library there lacks: by torch, in the order of the ranks.

The same results as the native core's on the CPU: float16, bfloat16 and float8 are accumulated in float32 and
rounded once, integers wrap around, AVG of integers divides toward zero, MIN and MAX pass NaN on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_BITWISE: dict[RedOpType | ReproducibleOp, _Combine] = {
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
_ARITHMETIC: dict[RedOpType | ReproducibleOp, _Combine] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
}
# Integers of these sizes hold the bits of any integer type.
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGN = -(1 << 63)


def fold(
    out: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp, factors: Sequence[float] | None
) -> None:
    """Puts the reduction of `sources`, one from each rank, into `out`, which may be one of them."""
    if op.type in _BITWISE:
        bits = _SIGNED[out.element_size()]
        combine = _BITWISE[op.type]
        result = sources[0].view(bits)
        for source in sources[1:]:
            result = combine(result, source.view(bits))
        out.view(bits).copy_(result)
        return
    flip = out.dtype == torch.uint64 and op.type in (RedOpType.MIN, RedOpType.MAX)
    combine = _ARITHMETIC[op.type]
    total: torch.Tensor | None = None
    for i, source in enumerate(sources):
        term = _widened(source, flip)
        if factors is not None:
            term = term * (factors[i] if term.is_floating_point() or term.is_complex() else int(factors[i]))
        total = term if total is None else combine(total, term)
    assert total is not None
    if op.type == RedOpType.AVG:
        if total.is_complex():
            total = torch.view_as_complex(torch.view_as_real(total) / len(sources))
        elif total.is_floating_point():
            total = total / len(sources)
        else:  # the sum wraps around before it is divided
            total = torch.div(total.to(out.dtype).to(torch.int64), len(sources), rounding_mode="trunc")
    if flip:
        total = total ^ _SIGN
    out.copy_(total.view(torch.uint64) if out.dtype == torch.uint64 else total.to(out.dtype))


def _widened(source: torch.Tensor, flip: bool) -> torch.Tensor:
    """In a type that holds the steps in between, and that torch calculates with."""
    if source.dtype == torch.uint64:  # in order, if its highest bit is turned
        bits = source.view(torch.int64)
        return bits ^ _SIGN if flip else bits
    if source.is_complex() or source.dtype == torch.float64:
        return source
    return source.to(torch.float32 if source.is_floating_point() else torch.int64)
