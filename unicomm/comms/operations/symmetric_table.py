"""The table of symmetric memory (csrc/symm/table.hpp) as Python uses it: capabilities, signals, tensors."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from unicomm import _core

_DLPACK_DEVICES = {"cpu": 1, "cuda": 2, "rocm": 10}


class Capability(enum.IntFlag):
    """What a SHMEM library can do; csrc/symm/table.hpp has the functions behind each capability."""

    HEAP = 1
    POINTER = 2
    PUT_GET = 4
    SIGNAL = 8
    ATOMICS = 16
    TEAMS = 32
    ABORT = 64


class SignalOp(enum.IntEnum):
    """What a signal does to the receiver's word."""

    SET = 0
    ADD = 1


class Compare(enum.IntEnum):
    """How a waiting rank compares its word with the value it waits for."""

    EQ = 0
    NE = 1
    GT = 2
    GE = 3
    LT = 4
    LE = 5


def bytes_at(native: Any, address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns memory that this process can address as a uint8 tensor, which keeps the domain `native`."""
    kind = "rocm" if torch.version.hip and device.type == "cuda" else device.type
    index = device.index or 0
    return from_dlpack(_core.symm_device_bytes(native, address, nbytes, _DLPACK_DEVICES[kind], index))
