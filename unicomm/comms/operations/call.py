"""Calls: an operation's arguments as hooks, recorder and backends receive them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from .dtypes import code_of
from .reduction import ReduceOp
from .table import Operation
from .wire import Wire

#: The bit of `Call.extra` that says that the ranks compare checksums. The other bits hash sizes.
CHECKED = 1 << 63


@dataclass
class Call:
    """One operation with validated arguments, which backends need not check again.

    Attributes:
        operation: the row of the operation table.
        inputs: tensors to read; outputs: tensors to write. An in-place tensor is in both. Where a rank
            passes nothing (not the root), the list is empty. A list argument is one tensor per rank.
        dtype: of all tensors, None for a barrier.
        count: elements of the operation's unit (see `table.Size`); 0 where every rank has its own.
        root: of a rooted collective, else -1. peer: of a point-to-point operation, else -1.
        op: the reduction, or None.
        in_splits, out_splits: rows for each rank, or None for equal parts.
        extra: anything else that all ranks must agree on, as 64 bits; with `CHECKED` they compare checksums.
        prepared: the handle of a persistent operation, for a backend that prepares them.
        wire: how the elements are encoded (wire.py), or None.
        contributions: of an all_reduce of several tensors a rank, these, one after the other; else None.
        timeout: seconds from the start of the operation.
        tag: of a message, see `Message`.
    """

    operation: Operation
    inputs: Sequence[torch.Tensor] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = field(default_factory=list)
    dtype: torch.dtype | None = None
    root: int = -1
    peer: int = -1
    op: ReduceOp | None = None
    timeout: float = 0.0
    async_op: bool = False
    # Set later where they are needed: each one that the constructor sets costs every operation time.
    count: int = field(default=0, init=False)
    in_splits: list[int] | None = field(default=None, init=False)
    out_splits: list[int] | None = field(default=None, init=False)
    extra: int = field(default=0, init=False)
    prepared: object = field(default=None, init=False)
    wire: Wire | None = field(default=None, init=False)
    contributions: torch.Tensor | None = field(default=None, init=False)
    seq: int = field(default=0, init=False)
    tag: int = field(default=0, init=False)
    deadline: float = field(default=0.0, init=False)

    def start_clock(self) -> None:
        """Called when the operation starts to run: the deadline counts from here."""
        self.deadline = time.monotonic() + self.timeout

    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def dtype_code(self) -> int:
        return 0 if self.dtype is None else code_of(self.dtype)

    @property
    def red_code(self) -> int:
        return 0 if self.op is None else self.op.code

    @property
    def message(self) -> Message:
        """The call of a point-to-point operation, or of one in a batch, as a message."""
        return Message(bool(self.inputs), self.peer, (self.inputs or self.outputs)[0], self.tag)

    @property
    def signature(self) -> tuple[int, int, int, int, int, int]:
        """What all ranks must agree on, in the order of `failures.faults.Claim`."""
        how = self.red_code if self.wire is None else self.red_code | self.wire.format << 8
        return self.operation.code, self.dtype_code, how, self.root, self.count, self.extra

    def changed(self, **changes: object) -> Call:
        """A copy of this call with other values, which completion hands to a backend instead."""
        new = Call.__new__(Call)
        new.__dict__.update(self.__dict__, **changes)
        return new


#: The greatest tag of a message of the user.
MOST_TAG = (1 << 31) - 2
#: The tag of messages that are parts of a collective: no receive of the user gets one, nor the reverse.
PART = MOST_TAG + 1


class Message(NamedTuple):
    """One message of an exchange: `tensor` to or from rank `peer`.

    `tag`, from 0 to `MOST_TAG`, or `PART`: a message goes to a receive with the same tag. Messages with one
    tag keep their order. Backends with streams ignore tags.
    """

    send: bool
    peer: int
    tensor: torch.Tensor
    tag: int = 0

    @classmethod
    def part(cls, send: bool, peer: int, tensor: torch.Tensor) -> Message:
        """Returns a message that is a part of a collective."""
        return cls(send, peer, tensor, PART)


@dataclass(frozen=True, slots=True)
class OpArgs:
    """What hooks receive of an operation; the tensors are the user's own.

    `name` and `op_id` identify the operation, `seq` is its sequence number. `messages` are the sends and
    receives of a batch, `ranks` those of a split and `child` the name asked for. The other fields are as in
    `Call`.
    """

    name: str
    op_id: int
    seq: int = 0
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    root: int = -1
    peer: int = -1
    op: ReduceOp | None = None
    wire: Wire | None = None
    in_splits: Sequence[int] | None = None
    out_splits: Sequence[int] | None = None
    async_op: bool = False
    timeout: float | None = None
    messages: Sequence[Message] = ()
    ranks: Sequence[int] = ()
    child: str = ""
    hints: Mapping[str, str | bool] | None = None

    @classmethod
    def of(cls, call: Call, op_id: int, messages: Sequence[Message] = ()) -> OpArgs:
        """Returns what hooks receive of a call. For unicomm itself."""
        shared = {name: getattr(call, name) for name in _SHARED}
        if call.contributions is not None:
            shared["inputs"] = [call.contributions]  # the output is not read
        return cls(call.name, op_id, messages=messages, **shared)


#: The fields that hooks receive as they are in the call.
_SHARED = [field.name for field in fields(Call) if field.name in OpArgs.__dataclass_fields__]
