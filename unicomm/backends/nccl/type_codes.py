"""NCCL's codes for element types and reductions, and the type that each torch dtype is reduced as."""

from __future__ import annotations

import torch

from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp

# ncclDataType_t of nccl.h; RCCL has the same codes.
CODES: dict[torch.dtype, int] = {
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
FP8_CODES: dict[torch.dtype, int] = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 11}
BYTE = CODES[torch.uint8]

_OPS = {RedOpType.SUM: 0, RedOpType.PRODUCT: 1, RedOpType.MAX: 2, RedOpType.MIN: 3, RedOpType.AVG: 4}
FIRST_CREATED_OP = len(_OPS)  # codes of created operations (PREMUL_SUM with its factor) begin here
_REDUCED = frozenset({*_OPS, RedOpType.PREMUL_SUM})
# The reduction that a bool tensor is reduced by, as bytes that are 0 or 1.
_BOOL_OPS = {
    RedOpType.SUM: RedOpType.MAX,
    RedOpType.MAX: RedOpType.MAX,
    RedOpType.BOR: RedOpType.MAX,
    RedOpType.PRODUCT: RedOpType.MIN,
    RedOpType.MIN: RedOpType.MIN,
    RedOpType.BAND: RedOpType.MIN,
}
_COMPLEX_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_LINEAR = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)  # reduce both parts of a number alike


def reductions(fp8: bool) -> frozenset[tuple[torch.dtype, RedOpType]]:
    """Returns the combinations of element type and reduction that the library supports."""
    plain = [*CODES, *(FP8_CODES if fp8 else ())]
    return frozenset(
        [
            *((dtype, op) for dtype in plain for op in _REDUCED),
            *((torch.bool, op) for op in _BOOL_OPS),
            *((dtype, op) for dtype in _COMPLEX_PARTS for op in _LINEAR),
        ]
    )


def reduced_as(dtype: torch.dtype, op: RedOpType) -> tuple[torch.dtype, RedOpType, int]:
    """Returns how a supported reduction is run: element type, reduction, and library elements per element."""
    if dtype == torch.bool:
        return torch.uint8, _BOOL_OPS[op], 1
    if dtype in _COMPLEX_PARTS:
        return _COMPLEX_PARTS[dtype], op, 2
    return dtype, op, 1


def direct_codes(
    reductions: frozenset[tuple[torch.dtype, RedOpType | ReproducibleOp]],
) -> dict[tuple[torch.dtype, int], tuple[int, int]]:
    """Returns (type code, reduction code) of those reductions that need no conversion, by type and number."""
    return {
        (dtype, op.value): (type_code(dtype), _OPS[RedOpType(op)])
        for dtype, op in reductions
        if op in _OPS and dtype in {**CODES, **FP8_CODES}
    }


def type_code(dtype: torch.dtype) -> int:
    return CODES[dtype] if dtype in CODES else FP8_CODES[dtype]


def op_code(op: RedOpType) -> int:
    return _OPS[op]


def factor_bytes(op: ReduceOp, dtype: torch.dtype) -> bytes:
    """Returns PREMUL_SUM's factor as the bytes of one element."""
    assert op.factor is not None
    if not dtype.is_floating_point:  # a factor that does not fit wraps around, as the products do
        width = dtype.itemsize
        return (int(op.factor) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(
        torch.tensor([op.factor], dtype=torch.float64, device="cpu").to(dtype).view(torch.uint8).tolist()
    )
