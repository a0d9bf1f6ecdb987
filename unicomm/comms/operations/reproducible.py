"""Reproducible reductions: the hint `reduction`, and what it makes of a call.

The exact sum of all ranks' elements is rounded once (csrc/reduce/exact.hpp), so every backend that folds all
ranks' elements together gets the same bits. Backends that add in another way leave it to completion.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .call import Call
from .reduction import RedOpType, ReduceOp, ReproducibleOp

NAME = "reduction"  # of the hint

#: The element types of reproducible sums.
DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_MADE: dict[RedOpType | ReproducibleOp, ReduceOp] = {
    RedOpType.SUM: ReduceOp(ReproducibleOp.REPRODUCIBLE_SUM),
    RedOpType.AVG: ReduceOp(ReproducibleOp.REPRODUCIBLE_AVG),
}
_ROUNDED = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PRODUCT, RedOpType.PREMUL_SUM})


def make(call: Call) -> tuple[str, str] | None:
    """Makes a checked call reproducible. Returns why it cannot be, and what to do; else None.

    Reductions that do not round, such as those of integers, stay as they are.
    """
    op, dtype = call.op, call.dtype
    if op is None or dtype is None or op.type not in _ROUNDED:
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    if op.type not in _MADE:
        return (
            f"{op.name} cannot be reproducible",
            "multiply before and use ReduceOp.SUM, or pass hints={'reduction': 'ordinary'} for this call",
        )
    if dtype not in DTYPES:
        return (
            f"{op.name} of {dtype} cannot be reproducible",
            "convert the tensor to float32 (complex numbers with torch.view_as_real), or pass"
            " hints={'reduction': 'ordinary'} for this call",
        )
    call.op = _MADE[op.type]
    return None


def asked_for(hints: Mapping[str, str]) -> bool:
    """Whether hints that `read_hints` accepts ask for reproducible reductions."""
    return hints.get(NAME, "ordinary") == "reproducible"
