"""The operations of MPI, as non-blocking requests that are polled.

A blocked MPI call cannot be interrupted, so all calls are non-blocking and are polled: without a pause for a
moment, then with naps, so that no core burns. A fault ends a wait early.

Data moves as bytes. The library's own reductions serve where they are defined as unicomm's are and a test
proves it on each library. Everything else, such as bfloat16, AVG or bool, is composed
(comms/execution/composed/completion.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from unicomm._core import FaultCode
from unicomm.backends.bootstrap import mpi_library
from unicomm.backends.out_of_band import OutOfBandBackend, SignatureCheck, Sockets, checks_signatures
from unicomm.comms.backend import PreparesOperations, Setup
from unicomm.comms.errors import BackendError
from unicomm.comms.failures.faults import Fault
from unicomm.comms.operations.call import MOST_TAG, PART, Call, Message
from unicomm.comms.operations.parts import bytes_of, copy_memory
from unicomm.comms.operations.reduction import RedOpType

_PART, _TAG = 0, 1  # tags: of parts of collectives, and the first one of the user's messages
# Seconds that a wait polls without a nap: if each rank has a core, and if not; and besides
_HOT, _CROWDED = 0.001, 0.0001
_RATE = 5e8  # the time that the data takes at this many bytes a second
_NAP = 0.001  # seconds, the longest between two polls
_BLOCK = 1 << 20  # bytes
_MOST = 1 << 30  # bytes of an operation of the library: its counts may be 32 bits wide

_WHOLE = {
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}
_TYPES = {
    **_WHOLE,
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS = {
    RedOpType.SUM: "SUM",
    RedOpType.PRODUCT: "PROD",
    RedOpType.MIN: "MIN",
    RedOpType.MAX: "MAX",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
_ARITHMETIC = (RedOpType.SUM, RedOpType.PRODUCT)
# Left out, as MPI differs from unicomm: Open MPI's sums of 8 and 16 bits saturate; minimum and maximum of
# floats do not pass NaN on; complex products treat infinities differently, and so do all operations bool.
REDUCTIONS = frozenset(
    {(dtype, op) for dtype in _WHOLE for op in _OPS if op not in _ARITHMETIC or dtype.itemsize >= 4}
    | {(dtype, op) for dtype in (torch.float32, torch.float64) for op in _ARITHMETIC}
    | {(dtype, RedOpType.SUM) for dtype in (torch.complex64, torch.complex128)}
)


class Operations(OutOfBandBackend, PreparesOperations):
    """The part of `MpiBackend` that runs operations."""

    def __init__(self, setup: Setup, MPI: Any, comm: Any, sockets: Sockets, here: int = 1) -> None:  # noqa: N803
        """`here`: the number of ranks on this host."""
        self.MPI = MPI
        self._comm = comm
        self._rank, self._size = setup.rank, setup.size
        self._hot = _HOT if here <= len(os.sched_getaffinity(0)) else _CROWDED
        self._wake = threading.Event()
        self._prepared: dict[object, tuple[Any, Any]] = {}
        compares = checks_signatures(setup) and setup.size > 1
        check = _MpiSignatureCheck(self, setup.rank, setup.size) if compares else None
        super().__init__(setup, [sockets], check)
        most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # not every communicator of Open MPI has it
        self.capabilities = replace(self.capabilities, most_tag=min(MOST_TAG, int(most) - _TAG))

    def _interrupt(self) -> None:
        self._wake.set()

    def _drop(self) -> None:
        pass  # requests that were under way are abandoned by the thread that waited for them

    def runs(self, call: Call) -> bool:
        # The same on all ranks: these operations have equal parts.
        largest = sum(t.numel() * t.element_size() for t in call.inputs)
        largest *= self._size if call.name.endswith("gather_single") else 1
        return self._size == 1 or largest <= _MOST

    def run(self, call: Call) -> None:
        getattr(self, f"_{call.name}")(call)

    # --- messages ------------------------------------------------------------------------------------------

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        # Receives first: what arrives then has its place.
        ordered = sorted(messages, key=lambda m: m.send)
        with self._in_messages(ordered, timeout):
            requests = [self.start(m) for m in ordered]
            statuses = [self.MPI.Status() for _ in ordered]
            size = sum(m.tensor.numel() for m in messages)
            self._finish(lambda: self.MPI.Request.Testall(requests, statuses), requests, ordered, size)
            for message, status in zip(ordered, statuses, strict=True):
                self.check_size(message, status)

    def start(self, message: Message) -> Any:
        """Starts a message and returns its request."""
        with self._message(message.tensor) as data:
            if message.send:
                return self._comm.Isend(data, message.peer, self._tag(message))
            source = self.MPI.ANY_SOURCE if message.peer < 0 else message.peer
            return self._comm.Irecv(data, source, self._tag(message))

    def _tag(self, message: Message) -> int:
        """Returns MPI's tag for a message."""
        if message.tag == PART:  # more than some MPIs have
            return _PART
        return _TAG + message.tag  # not more than `most_tag`

    def check_size(self, message: Message, status: Any) -> None:
        """Raises if a message is shorter than its tensor here; MPI itself refuses a longer one."""
        if message.send:
            return
        got, size = status.Get_elements(self.MPI.BYTE), message.tensor.numel()
        if got == size or (got == self.MPI.UNDEFINED and size >= 1 << 31):  # which MPI 3 does not count
            return
        source = status.Get_source()
        text = f"rank {source} sent {got} bytes, but the tensor here has {message.tensor.numel()}"
        self.channel.give_up(Fault(FaultCode.INTERNAL, self.channel.rank, detail=text))
        raise BackendError(
            text, culprits=[source], hint="sender and receiver pass tensors of the same dtype and size"
        )

    def _bytes(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """Returns the tensor's memory as MPI wants it: as bytes, counted for each of `parts` ranks."""
        size = tensor.numel() * tensor.element_size()
        return [self.MPI.buffer.fromaddress(tensor.data_ptr(), size), size // parts, self.MPI.BYTE]

    @contextlib.contextmanager
    def _message(self, tensor: torch.Tensor) -> Iterator[list[Any]]:
        """Yields a message's memory: bytes, or one element of a derived type if they are too many."""
        data, size, byte = self._bytes(tensor)
        if size <= _MOST:
            yield [data, size, byte]
            return
        blocks, rest = divmod(size, _BLOCK)
        block = byte.Create_contiguous(_BLOCK)
        kind = self.MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, byte]).Commit()
        try:
            yield [data, 1, kind]
        finally:  # requests under way keep them
            kind.Free()
            block.Free()

    def _numbers(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        data, size, _ = self._bytes(tensor, parts)
        return [data, size // tensor.element_size(), getattr(self.MPI, _TYPES[tensor.dtype])]

    def _end(self, request: Any, memory: Any, size: int) -> None:
        self._finish(request.Test, [request], memory, size)

    def _finish(self, done: Callable[[], Any], requests: list[Any], memory: Any, size: int) -> None:
        """Polls `done` until it is true. `size` in bytes says how long that takes if all goes well."""
        began = time.monotonic()
        hot = began + self._hot + size / _RATE
        try:
            while not done():
                self.check_fault()
                self.nap(began, hot)
        except BaseException as error:
            # A fault, or what a signal handler has raised; MPI's own error ends the request that has it.
            if len(requests) > 1 or not isinstance(error, self.MPI.Exception):
                mpi_library.abandon(requests, memory)
            raise

    def nap(self, began: float, hot: float) -> None:
        """Pauses between two polls of something that began at `began`; up to `hot` without sleep."""
        now = time.monotonic()
        if now < hot:
            os.sched_yield()
        else:
            self._wake.wait(min(_NAP, (now - began) / 20))

    # --- collectives ---------------------------------------------------------------------------------------

    def _collect(self, request: Any, call: Call) -> None:
        tensors = [*call.inputs, *call.outputs]
        self._end(request, tensors, sum(t.numel() * t.element_size() for t in tensors))

    def _op(self, call: Call) -> Any:
        assert call.op is not None
        return getattr(self.MPI, _OPS[RedOpType(call.op.type)])

    def _broadcast(self, call: Call) -> None:
        self._collect(self._comm.Ibcast(self._bytes(call.outputs[0]), call.root), call)

    def _all_reduce(self, call: Call) -> None:
        data = self._numbers(call.outputs[0].detach())
        self._collect(self._comm.Iallreduce(self.MPI.IN_PLACE, data, self._op(call)), call)

    def _reduce(self, call: Call) -> None:
        data = self._numbers(call.inputs[0].detach())
        root = self._rank == call.root
        ways = (self.MPI.IN_PLACE, data) if root else (data, None)
        self._collect(self._comm.Ireduce(*ways, self._op(call), call.root), call)

    def _reduce_scatter_single(self, call: Call) -> None:
        out, whole = call.outputs[0].detach(), call.inputs[0].detach()
        begin = whole.data_ptr()
        if begin <= out.data_ptr() < begin + whole.numel() * whole.element_size():
            whole = whole.clone()  # the output is a part of it, which MPI does not allow
        ways = self._numbers(whole, self._size), self._numbers(out)
        request = self._comm.Ireduce_scatter_block(*ways, self._op(call))
        self._end(request, [whole, out], 2 * whole.numel() * whole.element_size())

    def _all_gather_single(self, call: Call) -> None:
        if call.prepared is not None:
            self._run_prepared(call)
            return
        out = self._bytes(call.outputs[0], self._size)
        own = call.outputs[0].data_ptr() + self._rank * call.inputs[0].numel()
        here = call.inputs[0].data_ptr() == own
        data = self.MPI.IN_PLACE if here else self._bytes(call.inputs[0])
        self._collect(self._comm.Iallgather(data, out), call)

    def _gather_single(self, call: Call) -> None:
        out = self._bytes(call.outputs[0], self._size) if call.outputs else None
        data: Any = self._bytes(call.inputs[0])
        if call.outputs:
            own = call.outputs[0].data_ptr() + self._rank * call.inputs[0].numel()
            data = self.MPI.IN_PLACE if call.inputs[0].data_ptr() == own else data
        self._collect(self._comm.Igather(data, out, call.root), call)

    def _all_to_all_single(self, call: Call) -> None:
        ways = self._bytes(call.inputs[0], self._size), self._bytes(call.outputs[0], self._size)
        self._collect(self._comm.Ialltoall(*ways), call)

    def _barrier(self, call: Call) -> None:
        if self._check is None:  # else the comparison was a barrier already
            self._collect(self._comm.Ibarrier(), call)

    # --- persistent all-gather ---------------------------------------------------------------------------

    def _run_prepared(self, call: Call) -> None:
        """Runs in memory of its own: MPI keeps the address, and tensors may have another one in each call.

        So may the output, whose storage a program may free and allocate again.
        """
        out, data = bytes_of(call.outputs[0]), bytes_of(call.inputs[0])
        if call.prepared not in self._prepared:
            room: Any = torch.empty_like(out)
            try:
                request = self._comm.Allgather_init(self.MPI.IN_PLACE, self._bytes(room, self._size))
            except NotImplementedError:  # an MPI older than version 4
                request = room = None
            self._prepared[call.prepared] = request, room
        request, room = self._prepared[call.prepared]
        to = out if room is None else room
        copy_memory(to.narrow(0, self._rank * data.numel(), data.numel()), data)
        if request is None:
            self._collect(self._comm.Iallgather(self.MPI.IN_PLACE, self._bytes(out, self._size)), call)
            return
        request.Start()
        self._end(request, room, 2 * out.numel())
        copy_memory(out, room)

    def unprepare(self, handle: object) -> None:
        request, _ = self._prepared.pop(handle, (None, None))
        if request is not None and self.channel.fault is None:
            request.Free()


class _MpiSignatureCheck(SignatureCheck):
    """A comparison of signatures by an all-gather of MPI."""

    def __init__(self, operations: Operations, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._operations = operations

    def all_gather(self, mine: bytes) -> list[bytes]:
        everyone = bytearray(len(mine) * self._size)
        kind = self._operations.MPI.BYTE
        request = self._operations._comm.Iallgather([mine, len(mine), kind], [everyone, len(mine), kind])
        self._operations._end(request, (mine, everyone), 0)
        return [bytes(everyone[i : i + len(mine)]) for i in range(0, len(everyone), len(mine))]
