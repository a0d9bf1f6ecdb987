"""Operations of NCCL and RCCL: validated calls put on the current stream by the library's functions.

Collectives that the library has are its own; lists and splits of rows are groups of sends and receives, and
v-reductions groups of reduces. What it cannot reduce (bitwise operations, 16-bit integers) is composed in
comms/completion.py. Reductions in float16, bfloat16 and float8 are added up as the library does, which may
round at each step, unlike on the other backends.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unicomm.comms.backend import Backend
from unicomm.comms.call import Call, Message
from unicomm.comms.reduction import RedOpType, ReduceOp
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


class Operations(Backend):
    """The part of `NcclBackend` that runs operations."""

    _library: Library
    _native: Any
    _streams: Streams
    _device: torch.device
    _comm: int  # 0 when it has ended
    _rank: int
    _size: int
    _began: int  # a mark of the library's log
    _token: torch.Tensor  # a byte on the device
    _direct: dict[tuple[torch.dtype, RedOpType], tuple[int, int]]

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

    def _reduced(
        self, call: Call, what: str, function: Callable[..., int], to: torch.Tensor, count: int, *root: int
    ) -> None:
        """A reduction of one tensor into another; `count`: elements of ours."""
        dtype, op, width = self._reduction(call)
        try:
            pointers = call.inputs[0].data_ptr(), to.data_ptr()
            result = function(*pointers, count * width, dtype, op, *root, self._alive(), self._stream())
            self._do(what, result)
        finally:
            self._done_with(op)

    def direct_all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Callable[[], None] | None:
        numbers = self._direct.get((tensor.dtype, op.type))
        if numbers is None:
            return None

        def put() -> None:
            at = tensor.data_ptr()
            with self.on_device(self._device):
                result = self._native.all_reduce(
                    at, at, tensor.numel(), *numbers, self._alive(), self._stream()
                )
                self._do("AllReduce", result)

        return put

    def _all_reduce(self, call: Call) -> None:
        to = call.outputs[0]
        self._reduced(call, "AllReduce", self._native.all_reduce, to, to.numel())

    def _reduce(self, call: Call) -> None:
        source = call.inputs[0]
        to = call.outputs[0] if call.outputs else source
        self._reduced(call, "Reduce", self._native.reduce, to, source.numel(), call.root)

    def _reduce_scatter_single(self, call: Call) -> None:
        to = call.outputs[0]
        self._reduced(call, "ReduceScatter", self._native.reduce_scatter, to, to.numel())

    def _moved(
        self, what: str, function: Callable[..., int], source: int, to: int, nbytes: int, *root: int
    ) -> None:
        """A movement of `nbytes` for each rank, between two places."""
        self._do(what, function(source, to, nbytes, types.BYTE, *root, self._alive(), self._stream()))

    def _broadcast(self, call: Call) -> None:
        tensor = call.outputs[0] if call.outputs else call.inputs[0]
        at = tensor.data_ptr()
        self._moved("Broadcast", self._native.broadcast, at, at, tensor.nbytes, call.root)

    def _all_gather_single(self, call: Call) -> None:
        # Not by call.root: as a part of a rooted operation it has one.
        source, to = call.inputs[0], call.outputs[0].data_ptr()
        self._moved("AllGather", self._native.all_gather, source.data_ptr(), to, source.nbytes)

    def _gather_single(self, call: Call) -> None:
        source, to = call.inputs[0], call.outputs[0].data_ptr() if call.outputs else 0
        self._moved("Gather", self._native.gather, source.data_ptr(), to, source.nbytes, call.root)

    def _all_to_all_single(self, call: Call) -> None:
        source, to = call.inputs[0], call.outputs[0].data_ptr()
        share = source.nbytes // self._size
        self._moved("AlltoAll", self._native.all_to_all, source.data_ptr(), to, share)

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

    def _barrier(self, call: Call) -> None:
        pointer = self._token.data_ptr()
        op = types.op_number(RedOpType.MAX)
        result = self._native.all_reduce(pointer, pointer, 1, types.BYTE, op, self._alive(), self._stream())
        self._do("AllReduce", result)
