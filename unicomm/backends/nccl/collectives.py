"""Collectives and messages of NCCL and RCCL: the library's functions, called on the current stream.

A collective that the library has is one call. Lists and splits of rows are groups of sends and receives, and
v-reductions are groups of reduces. What the library cannot reduce (bitwise operations, 16-bit integers) is
composed in comms/execution/composed/completion.py. Unlike on other backends, sums in float16, bfloat16 and
float8 may be rounded at each step, and MIN and MAX of floats do not pass NaN on: the library takes the number
where only some ranks have NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from unicomm.comms.backend import Backend, IssuesDirectly, Prepare, RunsCollectives
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.operations.table import OPERATIONS, Kind, Role, Size

from . import type_codes
from .handle import Handle
from .result_codes import SUCCESS

ALWAYS_NATIVE = frozenset(
    {
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather_single",
        "reduce_scatter",
        "reduce_scatter_v",
        "reduce_scatter_single",
        "barrier",
    }
)

# Operations that are one call: the function's name in error messages, and in csrc/nccl.
_FUNCTIONS = {
    "broadcast": ("Broadcast", "broadcast"),
    "all_reduce": ("AllReduce", "all_reduce"),
    "reduce": ("Reduce", "reduce"),
    "all_gather_single": ("AllGather", "all_gather"),
    "reduce_scatter_single": ("ReduceScatter", "reduce_scatter"),
    "all_to_all_single": ("AlltoAll", "all_to_all"),
    "gather_single": ("Gather", "gather"),
    "send": ("Send", "send"),
    "recv": ("Recv", "recv"),
}


class LibraryCall(NamedTuple):
    """How an operation is called, derived from its row of the operation table.

    Attributes:
        name: the function's name in error messages. function: of the native table.
        tensors: indices of the operation's tensors whose addresses are passed, in this order.
        unit: index of the tensor that is counted; None for an operation without tensors.
        parts: number of parts that the count is divided by.
        counts_input: whether the counted tensor is an input.
        in_place: whether the input tensor is also the output.
        rooted: whether a rank is passed, which is the root or the peer.
    """

    name: str
    function: Callable[..., int]
    tensors: tuple[int, ...] = ()
    unit: int | None = None
    parts: int = 1
    counts_input: bool = True
    in_place: bool = False
    rooted: bool = False


def library_calls(native: Any, operations: Iterable[str], size: int) -> dict[str, LibraryCall]:
    """Returns the library's calls for these operations, send and recv, in a communicator of `size` ranks."""
    out = {"barrier": LibraryCall("AllReduce", native.all_reduce)}
    for name, (title, function) in _FUNCTIONS.items():
        row = OPERATIONS[name]
        message = row.kind is Kind.P2P
        if name not in operations and not message:
            continue
        reads = [i for i, arg in enumerate(row.tensors) if arg.role is not Role.OUT]
        writes = [i for i, arg in enumerate(row.tensors) if arg.role is not Role.IN]
        unit = next(i for i in (*reads, *writes) if row.tensors[i].size is Size.COUNT)
        out[name] = LibraryCall(
            title,
            getattr(native, function),
            (0,) if message else (reads[0], writes[0]),
            unit,
            size if row.shared else 1,
            unit in reads,
            reads == writes,
            row.rooted or message,
        )
    return out


class Collectives(Backend, RunsCollectives, IssuesDirectly):
    """The part of `NcclBackend` that runs operations."""

    _handle: Handle
    _rank: int
    _size: int
    _token: torch.Tensor  # a byte on the device, for barriers
    _direct: dict[tuple[torch.dtype, int], tuple[int, int]]
    _calls: dict[str, LibraryCall]

    def run(self, call: Call) -> None:
        with self._handle.on_device():
            if call.name in _FUNCTIONS:
                self._one_call(call)
            else:
                getattr(self, f"_{call.name}")(call)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        handle = self._handle
        with handle.on_device(), handle.in_call as comm, handle.group("Send/Recv"):
            stream = handle.stream()
            for send, peer, tensor, _ in messages:
                function = handle.native.send if send else handle.native.recv
                result = function(tensor.data_ptr(), tensor.nbytes, type_codes.BYTE, peer, comm, stream)
                handle.check("Send/Recv", result)

    def _reduction(self, call: Call) -> tuple[int, int, int]:
        """Returns (type code, reduction code, library elements per element).

        `_release_op` must be called with the reduction code afterwards.
        """
        assert call.op is not None
        assert call.dtype is not None
        dtype, kind, width = type_codes.reduced_as(call.dtype, RedOpType(call.op.type))
        code = type_codes.type_code(dtype)
        if kind is not RedOpType.PREMUL_SUM:
            return code, type_codes.op_code(kind), width
        factor, handle = type_codes.factor_bytes(call.op, dtype), self._handle
        with handle.in_call as comm:
            result, op = handle.native.premul_sum(factor, code, comm)
            handle.check("RedOpCreatePreMulSum", result)
        return code, op, width

    def _release_op(self, op: int) -> None:
        """Destroys a created reduction. The library keeps its factor for issued operations."""
        if op >= type_codes.FIRST_CREATED_OP:
            handle = self._handle
            with handle.in_call as comm:
                handle.check("RedOpDestroy", handle.native.op_destroy(op, comm))

    def direct(self, name: str) -> Prepare | None:
        if (call := self._calls.get(name)) is None:
            return None
        if call.unit is None:
            return lambda tensors, other, op: self._meet
        handle, function, rooted, parts = self._handle, call.function, call.rooted, call.parts
        unit_at, first_at, last_at = call.unit, call.tensors[0], call.tensors[-1]
        one_place, codes_of = len(call.tensors) == 1, self._direct

        def prepare(
            tensors: Sequence[torch.Tensor], other: int, op: ReduceOp | None
        ) -> Callable[[], None] | None:
            unit = tensors[unit_at]
            first = tensors[first_at].data_ptr()
            places = (first,) if one_place else (first, tensors[last_at].data_ptr())
            if op is None:
                arguments: tuple[int, ...] = (*places, unit.nbytes // parts, type_codes.BYTE)
            elif (codes := codes_of.get((unit.dtype, op.code))) is not None:
                arguments = (*places, unit.numel(), *codes)
            else:
                return None
            if rooted:
                arguments = (*arguments, other)

            def issue() -> None:
                with handle.on_device(), handle.in_call as comm:
                    result = function(*arguments, comm, handle.stream())
                    if result != SUCCESS:
                        handle.check(call.name, result)

            return issue

        return prepare

    def _one_call(self, call: Call) -> None:
        """Runs a collective that is one call of the library."""
        handle, own = self._handle, self._calls[call.name]
        source = call.inputs[0]
        to = call.outputs[0] if call.outputs else source if own.in_place else None
        unit = source if own.counts_input or to is None else to
        # call.root does not tell: as a part of a rooted operation, any operation has one.
        root = (call.root,) if own.rooted else ()
        places = source.data_ptr(), 0 if to is None else to.data_ptr()
        if call.op is None:
            count = unit.nbytes // own.parts
            with handle.in_call as comm:
                result = own.function(*places, count, type_codes.BYTE, *root, comm, handle.stream())
                handle.check(own.name, result)
            return
        dtype, op, width = self._reduction(call)
        try:
            count = unit.numel() * width
            with handle.in_call as comm:
                result = own.function(*places, count, dtype, op, *root, comm, handle.stream())
                handle.check(own.name, result)
        finally:
            self._release_op(op)

    def _reduce_scatter(self, call: Call) -> None:
        """Runs a group of reduces, each with its own root and size."""
        handle = self._handle
        to = call.outputs[0]
        dtype, op, width = self._reduction(call)
        try:
            with handle.in_call as comm, handle.group("Reduce"):
                stream = handle.stream()
                for root, share in enumerate(call.inputs):
                    at = share.data_ptr()
                    out = to.data_ptr() if root == self._rank else at
                    if count := share.numel() * width:
                        result = handle.native.reduce(at, out, count, dtype, op, root, comm, stream)
                        handle.check("Reduce", result)
        finally:
            self._release_op(op)

    _reduce_scatter_v = _reduce_scatter

    def _meet(self) -> None:
        handle, place = self._handle, self._token.data_ptr()
        op = type_codes.op_code(RedOpType.MAX)
        with handle.on_device(), handle.in_call as comm:
            stream = handle.stream()
            result = handle.native.all_reduce(place, place, 1, type_codes.BYTE, op, comm, stream)
            handle.check("AllReduce", result)

    def _barrier(self, call: Call) -> None:
        self._meet()
