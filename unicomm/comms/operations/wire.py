"""Fewer bytes between hosts: the hints `wire` and `wire_rounding`, and what they make of a call.

csrc/reduce/wire.hpp defines the formats. An operation that has one carries a `Wire` in its call.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from unicomm import _core

from .reduction import RedOpType, ReduceOp, ReproducibleOp

NAME, ROUNDING = "wire", "wire_rounding"  # of the hints

#: Elements up to which a tensor or part travels as it is.
SMALL = 1024

#: The element types that can be encoded.
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
OPERATIONS = frozenset(
    [
        *("all_reduce", "reduce_scatter", "reduce_scatter_v", "reduce_scatter_single"),
        *("all_gather", "all_gather_v", "all_gather_single"),
        *("all_to_all", "all_to_all_single", "all_to_all_v_single"),
    ]
)
_SUMS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})
_KEY = struct.Struct("<qqqq")


class WireFormat(enum.IntEnum):
    """How elements travel. The numbers are those of the native core."""

    BFLOAT16 = 1
    FLOAT8_E4M3FN = 2
    INT8 = 3
    MXFP8 = 4

    @property
    def text(self) -> str:
        """As the hint names it."""
        return self.name.lower()

    def bytes_of(self, count: int) -> int:
        """The bytes of `count` encoded elements."""
        return _core.wire_bytes(self, count)


@dataclass(frozen=True)
class Asked:
    """What hints ask for: a format and its rounding, to nearest even unless there is a `seed`."""

    format: WireFormat
    seed: int | None = None


@dataclass(slots=True, eq=False)
class Wire:
    """The encoding of one operation.

    Attributes:
        asked: format and rounding.
        sent: bytes that this rank has sent to other ranks, encoded and otherwise.
        residual: None, or one float32 for each element of the input: what earlier operations lost on this
            rank by rounding. It is added to the input, and replaced by what this operation loses.
        encoded: number of tensors that this rank has encoded.
    """

    asked: Asked
    sent: int = 0
    residual: torch.Tensor | None = None
    encoded: int = 0

    @property
    def format(self) -> WireFormat:
        return self.asked.format

    def key(self, seq: int, rank: int) -> int:
        """Returns the key of the random bits of the next tensor that is encoded; no two are alike."""
        self.encoded += 1
        data = _KEY.pack(self.asked.seed or 0, seq, rank, self.encoded)
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def asked_for(hints: Mapping[str, str]) -> Asked | None:
    """What hints that `read_hints` accepts ask for."""
    name = hints.get(NAME, "plain")
    if name == "plain":
        return None
    rounding, _, seed = hints.get(ROUNDING, "nearest").partition(":")
    return Asked(WireFormat[name.upper()], int(seed or 0) if rounding == "stochastic" else None)


def why_not(name: str, dtype: torch.dtype | None, op: ReduceOp | None) -> tuple[str, str] | None:
    """Why a call of operation `name` cannot be encoded, and what to do; None if it can."""
    plain = "or pass hints={'wire': 'plain'} for this call"
    if name not in OPERATIONS:
        return (
            f"no wire format for {name}",
            "wire formats serve all_reduce, reduce_scatter, all_gather and all_to_all; leave the hint out",
        )
    if op is not None and isinstance(op.type, ReproducibleOp):
        return (
            "a reproducible reduction has no wire format: its sums are exact",
            f"pass hints={{'reduction': 'ordinary'}} for this call, {plain}",
        )
    if dtype not in DTYPES:
        return f"{dtype} has no wire format", f"convert the tensor to float32, float16 or bfloat16, {plain}"
    if op is not None and op.type not in _SUMS:
        return f"{op.name} has no wire format", f"use SUM, AVG or PREMUL_SUM, {plain}"
    return None


def encoding(dtype: torch.dtype | None, asked: Asked) -> Wire | None:
    """Returns the encoding of a call that can be encoded; None if it would not be smaller."""
    assert dtype is not None
    return None if asked.format is WireFormat.BFLOAT16 and dtype.itemsize == 2 else Wire(asked)
