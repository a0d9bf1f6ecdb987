"""Element types and reductions of NCCL: its numbers, and as what our types travel."""

from __future__ import annotations

import torch

from unicomm.comms.operations.reduction import RedOpType, ReduceOp

# As in nccl.h, the same in RCCL's.
NUMBERS: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
FP8: dict[torch.dtype, int] = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 11}
BYTE = NUMBERS[torch.uint8]
FP8_SINCE = 22400

_OPS = {RedOpType.SUM: 0, RedOpType.PRODUCT: 1, RedOpType.MAX: 2, RedOpType.MIN: 3, RedOpType.AVG: 4}
FIRST_MADE = len(_OPS)  # operations with a factor have numbers from here on
_REDUCED = frozenset({*_OPS, RedOpType.PREMUL_SUM})
# For bytes that are 0 or 1.
_OF_BOOL = {
    RedOpType.SUM: RedOpType.MAX,
    RedOpType.MAX: RedOpType.MAX,
    RedOpType.BOR: RedOpType.MAX,
    RedOpType.PRODUCT: RedOpType.MIN,
    RedOpType.MIN: RedOpType.MIN,
    RedOpType.BAND: RedOpType.MIN,
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_LINEAR = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)  # do the same to both parts of a number


def reductions(fp8: bool) -> frozenset[tuple[torch.dtype, RedOpType]]:
    """Which reductions the library does itself, of which element types."""
    plain = [*NUMBERS, *(FP8 if fp8 else ())]
    return frozenset(
        [
            *((dtype, op) for dtype in plain for op in _REDUCED),
            *((torch.bool, op) for op in _OF_BOOL),
            *((dtype, op) for dtype in _PARTS for op in _LINEAR),
        ]
    )


def reduced_as(dtype: torch.dtype, op: RedOpType) -> tuple[torch.dtype, RedOpType, int]:
    """As what a reduction of `reductions` runs: element type, operation, and elements for each one."""
    if dtype == torch.bool:
        return torch.uint8, _OF_BOOL[op], 1
    if dtype in _PARTS:
        return _PARTS[dtype], op, 2
    return dtype, op, 1


def direct(
    reductions: frozenset[tuple[torch.dtype, RedOpType]],
) -> dict[tuple[torch.dtype, RedOpType], tuple[int, int]]:
    """Of these, the ones that run as they are: the library's numbers of type and operation."""
    return {
        (dtype, op): (number_of(dtype), _OPS[op])
        for dtype, op in reductions
        if op in _OPS and dtype in {**NUMBERS, **FP8}
    }


def number_of(dtype: torch.dtype) -> int:
    return NUMBERS[dtype] if dtype in NUMBERS else FP8[dtype]


def op_number(op: RedOpType) -> int:
    return _OPS[op]


def factor_bytes(op: ReduceOp, dtype: torch.dtype) -> bytes:
    """PREMUL_SUM's factor as one element."""
    assert op.factor is not None
    if not dtype.is_floating_point:  # what does not fit wraps around, as the products do
        width = torch.empty((), dtype=dtype).element_size()
        return (int(op.factor) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(torch.tensor([op.factor], dtype=torch.float64).to(dtype).view(torch.uint8).tolist())
