"""Reduce operations: their names, and the element types for which they are defined."""

from __future__ import annotations

import enum
import math
from typing import ClassVar, Final

import torch

from unicomm.comms.errors import InvalidArgumentError

from .dtypes import DTYPES


class RedOpType(enum.IntEnum):
    """Kinds of reduction. The numbers go into signatures and recorder rings."""

    SUM = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8
    AVG = 9


class ReproducibleOp(enum.IntEnum):
    """What `SUM` and `AVG` become under the hint `reduction=reproducible`; users do not name them."""

    REPRODUCIBLE_SUM = 10
    REPRODUCIBLE_AVG = 11


class ReduceOp:
    """How `all_reduce`, `reduce` and the reduce-scatters combine the ranks' elements.

    `SUM`, `PRODUCT`, `MIN`, `MAX`, `AVG` (sum divided by the number of ranks), `BAND`, `BOR`, `BXOR`,
    and `ReduceOp.PREMUL_SUM(factor)`, which multiplies each rank's elements by its own `factor` (a number
    or a tensor of one element) before summing.

    Defined alike on all backends of the CPU: float16, bfloat16 and float8 are accumulated in float32 and
    rounded once, as torch converts (float8_e4m3fn saturates); integers wrap
    around; `AVG` of integers divides toward zero; `MIN` and `MAX` pass NaN on; for bool `SUM` and `MAX` are
    OR, `PRODUCT` and `MIN` are AND.

    All ranks get the same bits. The order of summation, on which the last bits of inexact sums and products
    depend, is that of the ranks, except: on several hosts each host's ranks in their order, then the hosts
    in the order of their lowest ranks, but for small tensors of float16, bfloat16 and float8 over UCX; Gloo
    and MPI choose it for the reductions that they run themselves, of float32, float64 and complex numbers.
    NCCL and RCCL choose order and intermediate roundings for the types and reductions that they have, and
    their `MIN` and `MAX` give the number where only some ranks have NaN.
    """

    SUM: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]

    __slots__ = ("code", "factor", "type")

    def __init__(self, type: RedOpType | ReproducibleOp, factor: float | None = None) -> None:
        try:
            type = type if isinstance(type, ReproducibleOp) else RedOpType(type)
        except ValueError:
            raise InvalidArgumentError(
                f"{type!r} is no kind of reduction", hint="write e.g. ReduceOp.SUM or ReduceOp(RedOpType.SUM)"
            ) from None
        if (type == RedOpType.PREMUL_SUM) != (factor is not None):
            raise InvalidArgumentError(
                "a factor belongs to PREMUL_SUM and to nothing else",
                hint="write ReduceOp.PREMUL_SUM(factor), or e.g. ReduceOp.SUM without a factor",
            )
        self.type: Final[RedOpType | ReproducibleOp] = type
        self.factor: Final = factor
        self.code: Final = int(type)

    @staticmethod
    def PREMUL_SUM(factor: float | torch.Tensor) -> ReduceOp:
        """Returns the sum of the ranks' tensors times `factor`, a number or a tensor of one element.

        Raises `InvalidArgumentError` for anything else.
        """
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                raise InvalidArgumentError(
                    f"the factor of PREMUL_SUM has {factor.numel()} elements",
                    hint="pass a number or a tensor of one element",
                )
            factor = factor.item()
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise InvalidArgumentError(
                f"the factor of PREMUL_SUM is a {type(factor).__name__}",
                hint="pass a number or a tensor of one element",
            )
        try:
            if float(factor) != factor and not math.isnan(factor):
                raise InvalidArgumentError(
                    f"the factor {factor} of PREMUL_SUM has more digits than a float64",
                    hint="multiply the tensors yourself, and reduce by SUM",
                )
            return ReduceOp(RedOpType.PREMUL_SUM, float(factor))
        except OverflowError:
            raise InvalidArgumentError(
                "the factor of PREMUL_SUM is beyond what a float64 can hold", hint="pass a smaller number"
            ) from None

    @property
    def name(self) -> str:
        """The name, such as "SUM"."""
        return self.type.name

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" + (f"({self.factor})" if self.factor is not None else "")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self.type == other.type and self.factor == other.factor

    def __hash__(self) -> int:
        return hash((self.type, self.factor))

    def __reduce__(self) -> tuple[object, ...]:
        return (ReduceOp, (self.type, self.factor))


for _type in RedOpType:
    if _type != RedOpType.PREMUL_SUM:
        setattr(ReduceOp, _type.name, ReduceOp(_type))

#: Number and name of every kind of reduction, as records and signatures have them.
REDUCTION_NAMES: dict[int, str] = {int(red): red.name for red in (*RedOpType, *ReproducibleOp)}

_BITWISE = frozenset({RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR})
_ORDERED = frozenset({RedOpType.MIN, RedOpType.MAX})
_SCALED = frozenset({RedOpType.AVG, RedOpType.PREMUL_SUM})


def why_not(op: ReduceOp, dtype: torch.dtype) -> str | None:
    """Why `op` is undefined for `dtype`, or None where it is defined."""
    info = DTYPES.get(dtype)
    if info is None:
        return f"{dtype} can be moved but not reduced"
    if info.kind in ("float", "complex") and op.type in _BITWISE:
        return f"{op.name} is defined for integers and bool, not for {info.name}"
    if info.kind == "complex" and op.type in _ORDERED:
        return f"{op.name} needs an order, which {info.name} lacks"
    if info.kind == "bool" and op.type in _SCALED:
        return f"{op.name} is arithmetic, which bool lacks"
    if info.kind == "int" and op.factor is not None and not op.factor.is_integer():
        return f"the factor {op.factor} of PREMUL_SUM is no integer, but the tensor is {info.name}"
    return None
