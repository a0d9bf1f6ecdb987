"""Operations of NCCL and RCCL: validated calls put on the current stream by the library's functions.

Collectives that the library has are its own; lists and splits of rows are groups of sends and receives, and
v-reductions groups of reduces. What it cannot reduce (bitwise operations, 16-bit integers) is composed in
comms/execution/completion.py. Reductions in float16, bfloat16 and float8 are added up as the library
does, which may
round at each step, unlike on the other backends.
"""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from unicomm.comms.backend import Backend, IssuesDirectly, RunsCollectives
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.operations.table import OPERATIONS, Kind, Role, Size
from unicomm.comms.streams import Streams

from . import types
from .errors import IN_PROGRESS, SUCCESS, aborted
from .library import Library

OWN = frozenset(
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

# Operations that are one call, and the library's names for them: in its messages, and in csrc/nccl.
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
    """How an operation is called; its row of the operation table says that.

    Attributes:
        what: the library's name for it. function: of `_native`, or None where there is none.
        places: which of the operation's tensors are passed, in this order; unit: which one is counted, in
            `parts` parts; None without tensors. of_input: that one is read. in_place: it is written, too.
        rooted: it is told a rank, the root or the peer.
    """

    what: str
    function: Callable[..., int]
    places: tuple[int, ...] = ()
    unit: int | None = None
    parts: int = 1
    of_input: bool = True
    in_place: bool = False
    rooted: bool = False


def calls_of(native: Any, operations: Iterable[str], size: int) -> dict[str, LibraryCall]:
    """Those of the library for a communicator of `size` ranks: of these operations, and of messages."""
    out = {"barrier": LibraryCall("AllReduce", native.all_reduce)}
    for name, (what, function) in _FUNCTIONS.items():
        row = OPERATIONS[name]
        message = row.kind is Kind.P2P
        if name not in operations and not message:
            continue
        reads = [i for i, arg in enumerate(row.tensors) if arg.role is not Role.OUT]
        writes = [i for i, arg in enumerate(row.tensors) if arg.role is not Role.IN]
        unit = next(i for i in (*reads, *writes) if row.tensors[i].size is Size.COUNT)
        places = (0,) if message else (reads[0], writes[0])
        out[name] = LibraryCall(
            what,
            getattr(native, function),
            places,
            unit,
            size if row.shared else 1,
            unit in reads,
            reads == writes,
            row.rooted or message,
        )
    return out


class Operations(Backend, RunsCollectives, IssuesDirectly):
    """The part of `NcclBackend` that runs operations."""

    _library: Library
    _native: Any
    _streams: Streams
    _device: torch.device
    _comm: int  # 0 when it has ended
    _lock: threading.Lock  # of its end, and of questions after its state
    _rank: int
    _size: int
    _began: int  # a mark of the library's log
    _token: torch.Tensor  # a byte on the device
    _direct: dict[tuple[torch.dtype, RedOpType], tuple[int, int]]
    _calls: dict[str, LibraryCall]

    @classmethod
    @abc.abstractmethod
    def on_device(cls, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within, the library's calls of this thread are for that device."""

    def _alive(self) -> int:
        if not self._comm:
            raise aborted()
        return self._comm

    def _stream(self) -> int:
        return self._streams.handle(self._streams.current())

    def _do(self, what: str, result: int) -> None:
        if result == IN_PROGRESS:
            self._progress(what)
        elif result != SUCCESS:
            self._library.check(what, result, self._comm, self._began)

    def _progress(self, what: str) -> None:
        """With blocking=0: until the call has done what it had to do on the host."""
        while self._comm:
            with self._lock:  # the question finishes what is under way, which two threads at a time must not
                if not self._comm:
                    break
                asked, state = self._native.async_error(self._comm)
            self._library.check(what, asked, self._comm, self._began)
            if state != IN_PROGRESS:
                self._library.check(what, state, self._comm, self._began)
                return
            time.sleep(20e-6)
        raise aborted()

    @contextlib.contextmanager
    def _group(self, what: str) -> Iterator[None]:
        self._do(what, self._native.group_start())
        try:
            yield
        finally:
            result = self._native.group_end()
        self._do(what, result)

    def run(self, call: Call) -> None:
        with self.on_device(self._device):
            if call.name in _FUNCTIONS:
                self._by_call(call)
            else:
                getattr(self, f"_{call.name}")(call)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        comm, stream = self._alive(), self._stream()
        with self.on_device(self._device), self._group("Send/Recv"):
            for send, peer, tensor in messages:
                act = self._native.send if send else self._native.recv
                self._do("Send/Recv", act(tensor.data_ptr(), tensor.nbytes, types.BYTE, peer, comm, stream))

    def _reduction(self, call: Call) -> tuple[int, int, int]:
        """(element type, operation, elements for each of ours) for the library; then `_done_with` it."""
        assert call.op is not None
        assert call.dtype is not None
        dtype, kind, width = types.reduced_as(call.dtype, call.op.type)
        number = types.number_of(dtype)
        if kind is not RedOpType.PREMUL_SUM:
            return number, types.op_number(kind), width
        result, op = self._native.premul_sum(types.factor_bytes(call.op, dtype), number, self._alive())
        self._do("RedOpCreatePreMulSum", result)
        return number, op, width

    def _done_with(self, op: int) -> None:
        """The library keeps a factor for as long as it needs it."""
        if op >= types.FIRST_MADE:
            self._do("RedOpDestroy", self._native.op_destroy(op, self._alive()))

    def direct(
        self, name: str, tensors: Sequence[torch.Tensor], other: int, op: ReduceOp | None
    ) -> Callable[[], None] | None:
        if (call := self._calls.get(name)) is None:
            return None
        if call.unit is None:  # a barrier
            return self._meet
        unit = tensors[call.unit]
        more: tuple[int, ...] = (types.BYTE,)
        if op is None:
            count = unit.nbytes // call.parts
        elif (found := self._direct.get((unit.dtype, op.type))) is not None:
            count, more = unit.numel(), found
        else:
            return None
        if call.rooted:
            more = (*more, other)

        function, at = call.function, tensors[call.places[0]].data_ptr()
        places = (at,) if len(call.places) == 1 else (at, tensors[call.places[1]].data_ptr())

        def put() -> None:
            with self.on_device(self._device):
                result = function(*places, count, *more, self._alive(), self._stream())
                if result != SUCCESS:
                    self._do(call.what, result)

        return put

    def _by_call(self, call: Call) -> None:
        """A collective that is one call of the library's."""
        own = self._calls[call.name]
        source = call.inputs[0]
        to = call.outputs[0] if call.outputs else source if own.in_place else None
        unit = source if own.of_input or to is None else to
        # Not by call.root: as a part of a rooted operation any one has one.
        root = (call.root,) if own.rooted else ()
        places = source.data_ptr(), 0 if to is None else to.data_ptr()
        if call.op is None:
            count = unit.nbytes // own.parts
            self._do(own.what, own.function(*places, count, types.BYTE, *root, self._alive(), self._stream()))
            return
        dtype, op, width = self._reduction(call)
        try:
            count = unit.numel() * width
            result = own.function(*places, count, dtype, op, *root, self._alive(), self._stream())
            self._do(own.what, result)
        finally:
            self._done_with(op)

    def _reduce_scatter(self, call: Call) -> None:
        """A group of reduces, each with its own root and size."""
        to, comm, stream = call.outputs[0], self._alive(), self._stream()
        dtype, op, width = self._reduction(call)
        try:
            with self._group("Reduce"):
                for root, share in enumerate(call.inputs):
                    at = share.data_ptr()
                    out = to.data_ptr() if root == self._rank else at
                    if count := share.numel() * width:
                        result = self._native.reduce(at, out, count, dtype, op, root, comm, stream)
                        self._do("Reduce", result)
        finally:
            self._done_with(op)

    _reduce_scatter_v = _reduce_scatter

    def _meet(self) -> None:
        pointer = self._token.data_ptr()
        op = types.op_number(RedOpType.MAX)
        with self.on_device(self._device):
            stream = self._stream()
            result = self._native.all_reduce(pointer, pointer, 1, types.BYTE, op, self._alive(), stream)
            self._do("AllReduce", result)

    def _barrier(self, call: Call) -> None:
        self._meet()
