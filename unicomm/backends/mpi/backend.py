"""MPI, by mpi4py: whatever network the MPI library drives, one MPI communicator for each communicator.

A blocked MPI call cannot be interrupted, so all calls are non-blocking and are polled: hot for a moment, then
with naps, so that no core burns. What ends a wait early comes over connections beside MPI (watched.py).

Data moves as bytes. The library's own reductions serve where they are defined as ours are and a test proves
it on each library; everything else, such as bfloat16, AVG or bool, is composed
(comms/execution/completion.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unicomm.backends.bootstrap import addresses, mpi_library
from unicomm.backends.out_of_band import sockets as mesh
from unicomm.backends.out_of_band.backend import CHECK_HINT, WatchedBackend, checks
from unicomm.backends.out_of_band.fault_channel import Awaited, Operation
from unicomm.backends.out_of_band.signatures import Agreement
from unicomm.backends.out_of_band.sockets import Sockets
from unicomm.backends.out_of_band.wire import Fault
from unicomm.comms.backend import (
    Capabilities,
    ChecksProcess,
    Exchange,
    OpensExchange,
    PreparesOperations,
    Setup,
)
from unicomm.comms.errors import BackendError, CommTimeoutError, UnsupportedError
from unicomm.comms.execution import completion
from unicomm.comms.membership.environment import detect_environment
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.options import Hint

from .messages import MpiExchange

_TAG = 1
# Seconds that a wait polls without a nap, where each rank has a core and where it has not, besides
_HOT, _CROWDED = 0.001, 0.0001
_RATE = 5e8  # the time that the data takes at this many bytes a second
_NAP = 0.001  # seconds, the longest between two looks
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
# Where MPI's differ from ours: Open MPI's sums of 8 and 16 bits saturate; minimum and maximum of floats do
# not pass NaN on; complex products do something else with infinities, and bool with what is true.
REDUCTIONS = frozenset(
    {(dtype, op) for dtype in _WHOLE for op in _OPS if op not in _ARITHMETIC or dtype.itemsize >= 4}
    | {(dtype, op) for dtype in (torch.float32, torch.float64) for op in _ARITHMETIC}
    | {(dtype, RedOpType.SUM) for dtype in (torch.complex64, torch.complex128)}
)


class MpiBackend(WatchedBackend, OpensExchange, PreparesOperations, ChecksProcess):
    name = "mpi"
    library = "MPI"
    receives_from_any = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        operations=frozenset(
            [
                "broadcast",
                "all_reduce",
                "reduce",
                "all_gather_single",
                "reduce_scatter_single",
                "all_to_all_single",
                "gather_single",
                "barrier",
            ]
        ),
        reductions=REDUCTIONS,
        bytes_only=True,
        checks_mismatch=True,
        hints=(
            CHECK_HINT,
            Hint(
                "hostname",
                str,
                "",
                "Address at which this rank is told of failures. Default: by routing. For data, MPI chooses.",
            ),
        ),
    )

    def __init__(self, setup: Setup, MPI: Any, comm: Any, sockets: Sockets, here: int = 1) -> None:  # noqa: N803
        self._MPI = MPI
        self._comm = comm
        self._size = setup.size
        self._group = completion.Group(self, setup.rank, setup.size)
        self._hot = _HOT if here <= len(os.sched_getaffinity(0)) else _CROWDED
        self._wake = threading.Event()
        self._prepared: dict[object, tuple[Any, Any]] = {}
        compares = checks(setup) and setup.size > 1
        super().__init__(setup, sockets, _AgreementByMpi(self, setup.rank, setup.size) if compares else None)

    # --- creation ----------------------------------------------------------------------------------------

    @classmethod
    def check_usable(cls, size: int) -> None:
        MPI = mpi_library.load()  # noqa: N806
        if size > 1 and MPI.COMM_WORLD.Get_size() == 1:
            told = detect_environment()
            raise UnsupportedError(
                f"MPI ({mpi_library.name_of(MPI)}) knows this process alone, but there are {size} ranks"
                + (f" (by {told.source})" if told.size == size else ""),
                hint="start the program with the mpiexec of that library (or srun); torchrun starts no MPI"
                " processes. MPI4PY_LIBMPI chooses the library; `unicomm doctor` shows which is found",
            )

    @classmethod
    def connect(cls, setup: Setup) -> MpiBackend:
        MPI = mpi_library.load()  # noqa: N806
        if setup.size == 1:
            return cls(setup, MPI, MPI.COMM_SELF.Dup(), {})
        cls.check_usable(setup.size)
        addresses.guard_store(setup.store)
        place = addresses.here(setup.store)
        mine = {
            "address": place.address,
            "network": place.network,
            "rank": MPI.COMM_WORLD.Get_rank(),
            "world": [
                MPI.COMM_WORLD.Get_size(),
                mpi_library.name_of(MPI),
                os.environ.get("PMIX_NAMESPACE", os.environ.get("PMI_JOBID", "")),
            ],
        }
        told = [json.loads(blob) for blob in setup.rendezvous.exchange("mpi", json.dumps(mine).encode())]
        ranks = [info["rank"] for info in told]
        _check_one_world(setup, [info["world"] for info in told], ranks)
        try:
            places = [addresses.Place(info["address"], info["network"]) for info in told]
            host = setup.hints["hostname"] or addresses.choose(places, setup.rank) or "127.0.0.1"
        except OSError as error:
            raise BackendError(
                f"rank {setup.rank} cannot be reached from other hosts: {error}",
                comm=setup.name,
                culprits=[setup.rank],
                hint="connect the host to a network, or name an address by the hint 'hostname'",
            ) from error
        sockets = mesh.connect(setup.rendezvous, host, 1, setup.name, cls.library)[0]
        try:
            here = sum(info["network"] == place.network for info in told)
            return cls(setup, MPI, _create(MPI, setup, ranks), sockets, here)
        except BaseException:
            for s in sockets.values():
                s.close()
            raise

    def close(self) -> None:
        self._watch.close()
        for request, _ in self._prepared.values():
            request.Free()
        self._prepared.clear()
        if self._watch.fault is None:
            # Collective by its name; the standard expects it to be local, and it is in all known libraries.
            self._comm.Free()

    def forget(self) -> None:
        self._watch.forget()

    def _interrupt(self) -> None:
        self._wake.set()

    def _drop(self) -> None:
        pass  # what is under way was abandoned by who waited for it

    @classmethod
    def version(cls) -> str:
        return mpi_library.version()

    # --- operations --------------------------------------------------------------------------------------

    def run(self, call: Call) -> None:
        # The same on all ranks: these operations have equal parts.
        largest = sum(t.numel() * t.element_size() for t in call.inputs)
        largest *= self._size if call.name.endswith("gather_single") else 1
        with self._collective(call):
            if largest > _MOST and self._size > 1:
                completion.compose(self._group, call)
            else:
                getattr(self, f"_{call.name}")(call)

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        # Receives first: what arrives then has its place.
        ordered = sorted(messages, key=lambda m: m.send)
        name = "batch" if len(messages) > 1 else "send" if messages[0].send else "recv"
        awaits = []
        if not self._current:
            awaits = [Awaited(m.peer, m.send, self._count(m.peer, m.send), m.tensor.nbytes) for m in ordered]
        with self._watched(Operation(name, 0, timeout, time.monotonic() + timeout, awaits)):
            started = [(m, self.start(m)) for m in ordered]
            requests = [request for _, request in started]
            statuses = [self._MPI.Status() for _ in started]
            size = sum(m.tensor.numel() for m in messages)
            self._finish(
                lambda: self._MPI.Request.Testall(requests, statuses), requests, list(messages), size
            )
            for (message, _), status in zip(started, statuses, strict=True):
                self.check_size(message, status)

    def open_exchange(self) -> Exchange:
        return MpiExchange(self)

    def start(self, message: Message) -> Any:
        """The request of a message."""
        with self._message(message.tensor) as data:
            if message.send:
                return self._comm.Isend(data, message.peer, _TAG)
            source = self._MPI.ANY_SOURCE if message.peer < 0 else message.peer
            return self._comm.Irecv(data, source, _TAG)

    def check_size(self, message: Message, status: Any) -> None:
        """Raises where a message is shorter than its place; MPI itself refuses a longer one."""
        if message.send or message.tensor.numel() > _MOST:
            return
        if (got := status.Get_elements(self._MPI.BYTE)) == message.tensor.numel():
            return
        source = status.Get_source()
        text = f"rank {source} sent {got} bytes, but the tensor here has {message.tensor.numel()}"
        self._watch.give_up(Fault("error", self._watch.rank, detail=text))
        raise BackendError(
            text, culprits=[source], hint="sender and receiver pass tensors of the same dtype and size"
        )

    def _bytes(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """As MPI counts: for each of `parts` ranks."""
        size = tensor.numel() * tensor.element_size()
        return [self._MPI.buffer.fromaddress(tensor.data_ptr(), size), size // parts, self._MPI.BYTE]

    @contextlib.contextmanager
    def _message(self, tensor: torch.Tensor) -> Iterator[list[Any]]:
        """Its bytes, as one element of a type of that size where there are too many to be counted."""
        data, size, byte = self._bytes(tensor)
        if size <= _MOST:
            yield [data, size, byte]
            return
        blocks, rest = divmod(size, _BLOCK)
        block = byte.Create_contiguous(_BLOCK)
        kind = self._MPI.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK], [block, byte]).Commit()
        try:
            yield [data, 1, kind]
        finally:  # what is under way with them keeps them
            kind.Free()
            block.Free()

    def _numbers(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        data, size, _ = self._bytes(tensor, parts)
        return [data, size // tensor.element_size(), getattr(self._MPI, _TYPES[tensor.dtype])]

    def _end(self, request: Any, memory: Any, size: int) -> None:
        self._finish(request.Test, [request], memory, size)

    def _finish(self, over: Callable[[], Any], requests: list[Any], memory: Any, size: int) -> None:
        """Returns when `over()` is true; `size` in bytes says how long it may take when all goes well."""
        began = time.monotonic()
        hot = began + self._hot + size / _RATE
        while not over():
            if self._watch.fault is not None:
                mpi_library.abandon(requests, memory)
                self._check()
            self.nap(began, hot)

    def nap(self, began: float, hot: float) -> None:
        """Between two looks at something that began then, up to `hot` without sleep."""
        now = time.monotonic()
        if now < hot:
            os.sched_yield()
        else:
            self._wake.wait(min(_NAP, (now - began) / 20))

    def _collect(self, request: Any, call: Call) -> None:
        tensors = [*call.inputs, *call.outputs]
        self._end(request, tensors, sum(t.numel() * t.element_size() for t in tensors))

    def _op(self, call: Call) -> Any:
        assert call.op is not None
        return getattr(self._MPI, _OPS[call.op.type])

    def _broadcast(self, call: Call) -> None:
        self._collect(self._comm.Ibcast(self._bytes(call.outputs[0]), call.root), call)

    def _all_reduce(self, call: Call) -> None:
        data = self._numbers(call.outputs[0].detach())
        self._collect(self._comm.Iallreduce(self._MPI.IN_PLACE, data, self._op(call)), call)

    def _reduce(self, call: Call) -> None:
        data = self._numbers(call.inputs[0].detach())
        root = self._group.rank == call.root
        ways = (self._MPI.IN_PLACE, data) if root else (data, None)
        self._collect(self._comm.Ireduce(*ways, self._op(call), call.root), call)

    def _reduce_scatter_single(self, call: Call) -> None:
        out, whole = call.outputs[0].detach(), call.inputs[0].detach()
        begin = whole.data_ptr()
        if begin <= out.data_ptr() < begin + whole.numel() * whole.element_size():
            whole = whole.clone()  # its part is the output, and MPI takes them apart only
        ways = self._numbers(whole, self._size), self._numbers(out)
        request = self._comm.Ireduce_scatter_block(*ways, self._op(call))
        self._end(request, [whole, out], 2 * whole.numel() * whole.element_size())

    def _all_gather_single(self, call: Call) -> None:
        if call.prepared is not None:
            self._run_prepared(call)
            return
        out = self._bytes(call.outputs[0], self._size)
        own = call.outputs[0].data_ptr() + self._group.rank * call.inputs[0].numel()
        here = call.inputs[0].data_ptr() == own
        data = self._MPI.IN_PLACE if here else self._bytes(call.inputs[0])
        self._collect(self._comm.Iallgather(data, out), call)

    def _gather_single(self, call: Call) -> None:
        out = self._bytes(call.outputs[0], self._size) if call.outputs else None
        data: Any = self._bytes(call.inputs[0])
        if call.outputs:
            own = call.outputs[0].data_ptr() + self._group.rank * call.inputs[0].numel()
            data = self._MPI.IN_PLACE if call.inputs[0].data_ptr() == own else data
        self._collect(self._comm.Igather(data, out, call.root), call)

    def _all_to_all_single(self, call: Call) -> None:
        ways = self._bytes(call.inputs[0], self._size), self._bytes(call.outputs[0], self._size)
        self._collect(self._comm.Ialltoall(*ways), call)

    def _barrier(self, call: Call) -> None:
        if self._agreement is None:  # else all have just come
            self._collect(self._comm.Ibarrier(), call)

    # --- persistent all-gather ---------------------------------------------------------------------------

    def _run_prepared(self, call: Call) -> None:
        """Where the input lies may change, but not for MPI: it goes into its part of the output first."""
        out, data = call.outputs[0], call.inputs[0]
        own = out.narrow(0, self._group.rank * data.numel(), data.numel())
        if own.data_ptr() != data.data_ptr():
            own.copy_(data)
        if (made := self._prepared.get(call.prepared)) is None:
            ways = self._MPI.IN_PLACE, self._bytes(out, self._size)
            try:
                request = self._comm.Allgather_init(*ways)
            except NotImplementedError:  # an MPI older than version 4
                self._collect(self._comm.Iallgather(*ways), call)
                return
            made = self._prepared[call.prepared] = (request, out)
        made[0].Start()
        self._collect(made[0], call)

    def unprepare(self, handle: object) -> None:
        if (made := self._prepared.pop(handle, None)) is not None and self._watch.fault is None:
            made[0].Free()


class _AgreementByMpi(Agreement):
    def __init__(self, backend: MpiBackend, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._backend = backend

    def swap(self, mine: bytes) -> list[bytes]:
        everyone = bytearray(len(mine) * self._size)
        kind = self._backend._MPI.BYTE
        request = self._backend._comm.Iallgather([mine, len(mine), kind], [everyone, len(mine), kind])
        self._backend._end(request, (mine, everyone), 0)
        return [bytes(everyone[i : i + len(mine)]) for i in range(0, len(everyone), len(mine))]


def _check_one_world(setup: Setup, worlds: Sequence[list[Any]], ranks: Sequence[int]) -> None:
    """Raises, on all ranks, unless all of them belong to one MPI job with one library."""
    odd = [setup.labels[r] for r, world in enumerate(worlds) if world != worlds[0]]
    twice = [setup.labels[r] for r, rank in enumerate(ranks) if rank in ranks[:r]]
    if odd or twice:
        told = "; ".join(sorted({f"{name}, {size} processes" for size, name, _ in worlds}))
        raise UnsupportedError(
            f"ranks {odd or twice} belong to another MPI job than rank {setup.labels[0]} ({told})",
            comm=setup.name,
            hint="start all ranks with one mpiexec, and give all the same MPI library (MPI4PY_LIBMPI)",
        )


def _create(MPI: Any, setup: Setup, ranks: Sequence[int]) -> Any:  # noqa: N803
    """An MPI communicator of exactly the members, in their order. Made by a thread, since it blocks."""
    group = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    # Groups that are created at the same time, by other threads, are told apart by their tags.
    tag = int(setup.rendezvous.uid, 16) % min(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767, 1 << 20)
    made: list[Any] = []

    def create() -> None:
        try:
            made.append(MPI.COMM_WORLD.Create_group(group, tag))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=create, name="unicomm-mpi-create", daemon=True)
    thread.start()
    thread.join(max(0.1, setup.rendezvous.remaining()))
    if not made:
        raise CommTimeoutError(
            "all ranks had arrived, but MPI did not make their communicator in time",
            comm=setup.name,
            hint="a rank may have died meanwhile: look at the others' output; raise timeout= for slow ones",
        )
    group.Free()
    if isinstance(made[0], RuntimeError):
        raise BackendError(
            f"MPI could not make the communicator: {made[0]}",
            comm=setup.name,
            hint="is there a limit to the number of communicators? finalize those that are not needed",
        ) from made[0]
    made[0].Set_errhandler(MPI.ERRORS_RETURN)
    return made[0]
