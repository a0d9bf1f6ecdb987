"""The SHMEM backends: their operations are puts with signals into the members' memory.

Beside the library's world, the ranks have out-of-band connections (backends/out_of_band), on which they tell
each other what goes wrong. SHMEM libraries notice no dead process, and their waits cannot be interrupted. If
operations run on the host, as over the table of the host's memory, the table's own waits are ended. If they
run on a stream, the stream waits for words in this rank's memory; to end the wait, this rank sets them
itself.

Reductions are composed (comms/execution/composed/completion.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from unicomm._core import FaultCode
from unicomm.backends.out_of_band import COMPARE, Awaited, OutOfBandBackend, Sockets
from unicomm.backends.vendor.shmem_libraries import NVSHMEM, ROCSHMEM, ShmemVendor, open_table
from unicomm.comms.backend import (
    Capabilities,
    ChoosesDevice,
    HasSymmetricMemory,
    ReportsMemory,
    Setup,
    UsesStreams,
)
from unicomm.comms.errors import BackendError, CommError, UnsupportedError
from unicomm.comms.failures.faults import Fault, core_error
from unicomm.comms.failures.first_cause import GRACE
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.parts import parts_of
from unicomm.comms.operations.symmetric_table import Capability, bytes_at
from unicomm.comms.streams import Streams, TorchStreams, numbered, on_device

from . import creation
from .chunk_transfer import ChunkTransfer
from .heap import Heap, Region, current_stream, drain

_FAULT_KNOWN = GRACE + 1.0  # seconds after which all live ranks know of a fault; streams are released then


class _TableFault(RuntimeError):
    """A fault that a call of the table returned."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail or f"fault {code}")
        self.code = code


class ShmemBackend(OutOfBandBackend, UsesStreams, ChoosesDevice, HasSymmetricMemory, ReportsMemory):
    """The base of the SHMEM backends. A subclass names a `vendor` or has another `table`."""

    vendor: ClassVar[ShmemVendor]
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        operations=frozenset(
            [
                "broadcast",
                "all_gather",
                "all_gather_v",
                "all_gather_single",
                "all_to_all",
                "all_to_all_single",
                "all_to_all_v_single",
                "gather",
                "gather_single",
                "scatter",
                "barrier",
            ]
        ),
        bytes_only=True,
        checks_mismatch=True,
        captured=False,  # signals are counted, and a replay would repeat the counts
        hints=creation.HINTS,
    )

    # --- what a subclass for another table or device replaces --------------------------------------------

    @classmethod
    def table(cls, path: str = "") -> Any:
        """Returns the library's table; `path` is the file that the hint `library` names."""
        return open_table(cls.vendor, path)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams | None:
        return TorchStreams(device)

    @classmethod
    def use_device(cls, device: torch.device) -> None:
        """Creates this thread's context of the device, from which the library takes the device.

        Only the first use of a device creates its context; choosing the device need not.
        """
        torch.empty(1, device=device)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the current stream."""
        if to.data_ptr() != source.data_ptr():
            to.copy_(source)

    # --- creation and end ----------------------------------------------------------------------------------

    def __init__(
        self,
        setup: Setup,
        table: Any,
        heap: Heap,
        region: Region,
        pes: Sequence[int],
        streams: Streams | None,
        sockets: Sequence[Sockets],
    ) -> None:
        self._table, self._heap, self._region = table, heap, region
        self._rank, self._size = setup.rank, setup.size
        self._pes = list(pes)
        self._device, self._streams = setup.device, streams
        self._aborted = False
        self._symmetric_domain: Any = None  # symmetric memory's own end of the library's world
        self._transfer = ChunkTransfer(heap, region, setup.rank, pes, self._raise_if_fault)
        super().__init__(setup, sockets)

    @classmethod
    def which_device(cls, device: torch.device) -> torch.device:
        return numbered(device)

    @classmethod
    def connect(cls, setup: Setup) -> ShmemBackend:
        table = cls.table(setup.hints["library"])
        creation.check(setup, cls.name, table)
        streams = cls.device_streams(setup.device)
        parent = setup.parent
        with on_device(setup.device):
            cls.use_device(setup.device)
            if type(parent) is cls:
                parent.check_fault()
                heap = parent._heap
            else:
                heap = creation.create_heap(setup, cls.vendor.title, table, streams)
            pes = [int(pe) for pe in setup.rendezvous.exchange("PEs", str(heap.pe).encode())]
            region = heap.acquire_region(setup.rendezvous, pes)
            sockets: list[Sockets] = [{}]
            try:
                if setup.size > 1:
                    sockets = creation.connect(setup, cls.vendor.title, streams)
                return cls(setup, table, heap, region, pes, streams, sockets)
            except BaseException:
                for each in sockets:
                    for s in each.values():
                        s.close()
                heap.release_region(region, clean=True)
                raise

    def streams(self) -> Streams | None:
        return self._streams

    def close(self) -> None:
        clean = self.channel.fault is None and not self._aborted and self._drained()
        super().close()
        with on_device(self._device):
            self._heap.release_region(self._region, clean)
        del self._heap, self._transfer, self._symmetric_domain

    def _drained(self) -> bool:
        """Returns whether all data that this rank has sent is there, so that its region may be used again."""
        with on_device(self._device):
            return self._heap.domain.quiet(self._stream()) is None and drain(self._streams)

    def forget(self) -> None:
        # The destructor of the heap would take this child for its parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._heap))
        super().forget()

    def _interrupt(self) -> None:
        super()._interrupt()
        if Capability.ABORT in Capability(self._table.capabilities):
            for domain in filter(None, (self._heap.domain, self._symmetric_domain)):
                domain.abort()

    def abort(self) -> None:
        super().abort()
        if self._streams is not None and not self._aborted:
            self._aborted = True
            arguments = self._heap, self._region, self._streams
            threading.Thread(
                target=self._release_stream, args=arguments, name="unicomm-shmem-release", daemon=True
            ).start()

    def _release_stream(self, heap: Heap, region: Region, streams: Streams) -> None:
        """Ends the waits of a stream. What follows them on the stream still runs and may send data that is
        worthless. So it waits until all other ranks know of the fault.
        """
        time.sleep(_FAULT_KNOWN)
        # A copy of the device, since the library may accept no more calls.
        words, released = (
            bytes_at(heap.domain, at, heap.words_bytes, self._device)
            for at in (region.words, heap.released_words)
        )
        with on_device(self._device), streams.use(streams.new()):
            self._copy(words, released)

    def _drop(self) -> None:
        pass

    def late_error(self) -> CommError | None:
        return self.fault()

    def memory(self) -> dict[str, int]:
        return {"symmetric heap": self._heap.nbytes}

    @classmethod
    def version(cls) -> str:
        cls.table()
        return cls.vendor.version()

    # --- symmetric memory ----------------------------------------------------------------------------------

    def symmetric_table(self, one_host: bool = True) -> Any:
        if self._pes != list(range(self._heap.pes)):
            raise UnsupportedError(
                f"{self.vendor.title} has one symmetric memory, that of all its {self._heap.pes} ranks",
                hint="initialise it on the communicator that this one was split from, and use it here by "
                "unicomm.symm.init_team",
            )
        return self._table

    def symmetric_joined(self, uid: bytes, domain: Any) -> None:
        self._symmetric_domain = domain

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        code, culprits, detail = fault[0], fault[1], fault[3]
        if code != FaultCode.TIMEOUT and (known := self.fault()) is not None:
            raise known
        if code == FaultCode.UNSUPPORTED:
            raise UnsupportedError(f"{self.vendor.title}: {detail}", hint=creation.SHARED_GPU)
        if code == FaultCode.INTERNAL:
            raise BackendError(f"{self.vendor.title}: {detail}", culprits=culprits, hint="see docs/shmem.md")
        raise core_error(fault, timeout)

    # --- operations ----------------------------------------------------------------------------------------

    def _stream(self) -> int:
        return current_stream(self._streams)

    def _raise_if_fault(self, fault: Any) -> None:
        if fault is not None:
            raise _TableFault(fault[0], fault[3])

    def failure(self, error: Exception, awaits: Sequence[Awaited]) -> CommError:
        if isinstance(error, _TableFault) and error.code == FaultCode.INTERNAL and self.channel.fault is None:
            fault = self.channel.give_up(Fault(FaultCode.INTERNAL, self.channel.rank, detail=str(error)))
            return self._error_of(fault)
        return super().failure(error, awaits)

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        if self._streams is None:
            super().collective(call, run)
        elif self._check is not None:
            super().collective(call, lambda: self._issue(run))
        else:
            self._issue(run)

    def _issue(self, run: Callable[[], None]) -> None:
        """Puts an operation on the stream. The stream watchdog keeps its deadline."""
        assert self._streams is not None
        self.check_fault()
        try:
            run()
        except _TableFault as error:
            raise self.failure(error, []) from error

    def run(self, call: Call) -> None:
        with on_device(self._device):
            if call.name == "broadcast":
                self._transfer.broadcast(call.outputs[0], call.root, self._stream())
            elif call.name == "barrier":
                self._transfer.barrier(self._stream())
            else:
                self._swap(*_shares(call, self._rank, self._size))

    def _swap(self, ins: dict[int, torch.Tensor], outs: dict[int, torch.Tensor]) -> None:
        """Moves `ins` to other ranks and `outs` from them, by rank.

        Empty tensors are not sent; both ends know of them.
        """
        if self._rank in ins:
            self._copy(outs[self._rank], ins[self._rank])
        outgoing = {r: [t] for r, t in ins.items() if r != self._rank and t.numel()}
        incoming = {r: [t] for r, t in outs.items() if r != self._rank and t.numel()}
        self._transfer.move(outgoing, incoming, self._stream())

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[torch.Tensor]] = {}
        for send, peer, tensor, _ in messages:
            (outgoing if send else incoming).setdefault(peer, []).append(tensor)

        def move() -> None:
            with on_device(self._device):
                self._transfer.move(outgoing, incoming, self._stream())

        if self._streams is not None:
            self._issue(move)
            return
        with self._in_messages(messages, timeout, COMPARE):
            move()


def _shares(call: Call, rank: int, size: int) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Returns the tensors that a call moves from this rank and to this rank, by the other rank."""
    name = call.name
    if name.startswith("all_gather"):
        return dict.fromkeys(range(size), call.inputs[0]), _by_rank(call.outputs, None, size)
    if name.startswith("gather"):
        ins = {call.root: call.inputs[0]}
        return ins, _by_rank(call.outputs, None, size) if rank == call.root else {}
    if name == "scatter":
        outs = {call.root: call.outputs[0]}
        return _by_rank(call.inputs, None, size) if rank == call.root else {}, outs
    ins, outs = _by_rank(call.inputs, call.in_splits, size), _by_rank(call.outputs, call.out_splits, size)
    return ins, outs


def _by_rank(tensors: Sequence[torch.Tensor], splits: list[int] | None, size: int) -> dict[int, torch.Tensor]:
    return dict(enumerate(parts_of(tensors, splits, size)))


class NvshmemBackend(ShmemBackend):
    """The backend `nvshmem`: NVIDIA's library."""

    name = "nvshmem"
    library = "NVSHMEM"
    vendor = NVSHMEM


class RocshmemBackend(ShmemBackend):
    """The backend `rocshmem`: AMD's library, in the unit that `unicomm build rocshmem` builds."""

    name = "rocshmem"
    library = "rocSHMEM"
    vendor = ROCSHMEM
