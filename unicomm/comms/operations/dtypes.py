"""Element types: the numbers that the native core, the recorder and the signatures use for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DTypeInfo:
    code: int
    dtype: torch.dtype
    name: str
    kind: str  # "float", "int", "bool" or "complex"


_ROWS = [
    (1, torch.float64, "float"),
    (2, torch.float32, "float"),
    (3, torch.float16, "float"),
    (4, torch.bfloat16, "float"),
    (5, torch.float8_e4m3fn, "float"),
    (6, torch.float8_e5m2, "float"),
    (7, torch.int8, "int"),
    (8, torch.int16, "int"),
    (9, torch.int32, "int"),
    (10, torch.int64, "int"),
    (11, torch.uint8, "int"),
    (12, torch.uint16, "int"),
    (13, torch.uint32, "int"),
    (14, torch.uint64, "int"),
    (15, torch.bool, "bool"),
    (16, torch.complex64, "complex"),
    (17, torch.complex128, "complex"),
]
OTHER = 18  # any other type: can be moved, cannot be reduced
# Types that can be moved, not reduced, and that records and mismatches name: those of the OCP's microscaling
# formats, and AMD's float8. Older versions of torch lack some.
_MOVED = {
    19: "float8_e8m0fnu",
    20: "float4_e2m1fn_x2",
    21: "float8_e4m3fnuz",
    22: "float8_e5m2fnuz",
}

#: The types that can be reduced.
DTYPES: dict[torch.dtype, DTypeInfo] = {
    dtype: DTypeInfo(code, dtype, str(dtype).removeprefix("torch."), kind) for code, dtype, kind in _ROWS
}
NAMES: dict[int, str] = {
    0: "",
    OTHER: "other",
    **{info.code: info.name for info in DTYPES.values()},
    **_MOVED,
}
_CODES: dict[torch.dtype, int] = {info.dtype: info.code for info in DTYPES.values()} | {
    getattr(torch, name): code for code, name in _MOVED.items() if hasattr(torch, name)
}


def code_of(dtype: torch.dtype) -> int:
    """The core's number for `dtype`; `OTHER` for a type that has no number of its own."""
    return _CODES.get(dtype, OTHER)


def describe(tensor: torch.Tensor) -> tuple[int, int, int, int, int, tuple[int, ...]]:
    """What the native core needs to know of a tensor where torch has no DLPack exchange API.

    Returns (address, dtype number, bytes of an element, contiguous, DLPack device type, shape).
    """
    device = 1 if tensor.device.type == "cpu" else 2
    address = tensor.data_ptr() if tensor.device.type != "meta" else 0
    shape = tuple(tensor.shape)
    return address, code_of(tensor.dtype), tensor.element_size(), int(tensor.is_contiguous()), device, shape
