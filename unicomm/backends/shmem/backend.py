"""The communicator of a SHMEM library: its operations are puts with signals into the members' memory.

Beside the library's world, the ranks have out-of-band connections (backends/out_of_band), on which they tell
each other what goes wrong: SHMEM libraries know of no dead process and cannot be interrupted. Where an
operation runs on the host, as over the table of the host's memory, the table's own waits are ended. Where it
runs on a stream, the stream waits for words in this rank's memory; to end it, this rank sets them itself.

What reduces is composed (comms/execution/completion.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from unicomm.backends.out_of_band import COMPARE, Awaited, Fault, OutOfBandBackend, Sockets
from unicomm.backends.shm import _error as error_of_core
from unicomm.backends.vendor.shmem import NVSHMEM, ROCSHMEM, Vendor, table_of
from unicomm.comms.backend import (
    Capabilities,
    ChoosesDevice,
    HasSymmetricMemory,
    ReportsMemory,
    Setup,
    UsesStreams,
)
from unicomm.comms.errors import BackendError, CommError, UnsupportedError
from unicomm.comms.execution.completion import parts_of
from unicomm.comms.failures.first_cause import GRACE
from unicomm.comms.memory.device_memory import bytes_at
from unicomm.comms.memory.symmetric import Capability
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.streams import Streams, TorchStreams, numbered

from . import making
from .heap import Heap, Region
from .pipe import Pipe

_TIMEOUT, _PEER_LOST, _ABORTED, _INTERNAL, _UNSUPPORTED = 1, 2, 4, 5, 7  # FaultCode
_HEARD = GRACE + 1.0  # seconds after which all ranks that live know of a fault; only then streams are let go


class _TableFault(RuntimeError):
    """What a call of the table returned."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail or f"fault {code}")
        self.code = code


class ShmemBackend(OutOfBandBackend, UsesStreams, ChoosesDevice, HasSymmetricMemory, ReportsMemory):
    """A base: a class of it for each library says `vendor`. Another table is one with its own `table`."""

    vendor: ClassVar[Vendor]
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
        captured=False,  # signals are counted, which a graph would repeat
        hints=making.HINTS,
    )

    # --- what another table or device replaces -----------------------------------------------------------

    @classmethod
    def table(cls, path: str = "") -> Any:
        """The library's; `path` where it is asked for."""
        return table_of(cls.vendor, path)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams | None:
        return TorchStreams(device)

    @classmethod
    def on_device(cls, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within, the library's calls of this thread are for that device."""
        found: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
        return found

    @classmethod
    def use_first(cls, device: torch.device) -> None:
        """The library takes the device by the context that this thread has, which it gets at its first use:
        choosing a device need not be one."""
        torch.empty(1, device=device)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream, as all that a call does."""
        if to.data_ptr() != source.data_ptr():
            to.copy_(source)

    # --- life ----------------------------------------------------------------------------------------------

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
        self._joined: Any = None  # the symmetric memory's own end of the library's world
        self._pipe = Pipe(heap, region, setup.rank, pes, self._done)
        super().__init__(setup, sockets)

    @classmethod
    def which_device(cls, device: torch.device) -> torch.device:
        return numbered(device)

    @classmethod
    def connect(cls, setup: Setup) -> ShmemBackend:
        table = cls.table(setup.hints["library"])
        making.check(setup, cls.name, table)
        streams = cls.device_streams(setup.device)
        parent = setup.parent
        with cls.on_device(setup.device):
            cls.use_first(setup.device)
            if type(parent) is cls:
                parent.check_fault()
                heap = parent._heap
            else:
                heap = making.make_heap(setup, cls.vendor.title, table, streams)
            pes = [int(pe) for pe in setup.rendezvous.exchange("PEs", str(heap.pe).encode())]
            region = heap.take(setup.rendezvous)
            sockets: list[Sockets] = [{}]
            try:
                if setup.size > 1:
                    sockets = making.connect(setup, cls.vendor.title, streams)
                return cls(setup, table, heap, region, pes, streams, sockets)
            except BaseException:
                for each in sockets:
                    for s in each.values():
                        s.close()
                heap.leave(region, clean=True)
                raise

    def streams(self) -> Streams | None:
        return self._streams

    def close(self) -> None:
        clean = self.channel.fault is None and not self._aborted and self._emptied()
        super().close()
        with self.on_device(self._device):
            self._heap.leave(self._region, clean)
        del self._heap, self._pipe, self._joined

    def _emptied(self) -> bool:
        """Whether all that this rank has said to others is there, so that its region may be used again."""
        with self.on_device(self._device):
            stream = self._stream()
            if self._heap.domain.quiet(stream) is not None:
                return False
            return making.emptying(self._streams)()

    def forget(self) -> None:
        # Its destructor would take this child for its parent.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._heap))
        super().forget()

    def _interrupt(self) -> None:
        super()._interrupt()
        if Capability.ABORT in Capability(self._table.capabilities):
            for domain in filter(None, (self._heap.domain, self._joined)):
                domain.abort()

    def abort(self) -> None:
        super().abort()
        if self._streams is not None and not self._aborted:
            self._aborted = True
            arguments = self._heap, self._region, self._streams
            threading.Thread(
                target=self._let_go, args=arguments, name="unicomm-shmem-let-go", daemon=True
            ).start()

    def _let_go(self, heap: Heap, region: Region, streams: Streams) -> None:
        """Ends what a stream waits for. What comes after it there still runs, and may send what never came:
        so not before all others know that it must not be used.
        """
        time.sleep(_HEARD)
        # By the device and not by the library, which may be of no more use.
        words, high = (
            bytes_at(heap.domain, at, heap.words_bytes, self._device) for at in (region.words, heap.high)
        )
        with self.on_device(self._device), streams.use(streams.new()):
            self._copy(words, high)

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
        self._joined = domain

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        code, culprits, _, detail = fault
        if code != _TIMEOUT and (known := self.fault()) is not None:
            raise known
        if code == _UNSUPPORTED:
            raise UnsupportedError(f"{self.vendor.title}: {detail}", hint=making.SHARED_GPU)
        if code == _INTERNAL:
            raise BackendError(f"{self.vendor.title}: {detail}", culprits=culprits, hint="see docs/shmem.md")
        raise error_of_core(fault, timeout)

    # --- operations ----------------------------------------------------------------------------------------

    def _stream(self) -> int:
        return 0 if self._streams is None else self._streams.handle(self._streams.current())

    def _done(self, fault: Any) -> None:
        if fault is not None:
            raise _TableFault(fault[0], fault[3])

    def failure(self, error: Exception, awaits: Sequence[Awaited]) -> CommError:
        if isinstance(error, _TableFault) and error.code == _INTERNAL and self.channel.fault is None:
            fault = self.channel.give_up(Fault("error", self.channel.rank, detail=str(error)))
            return self._error_of(fault)
        return super().failure(error, awaits)

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        if self._streams is None or self._check is not None:
            super().collective(call, self._issued(run))
        else:
            self._issue(run)

    def _issued(self, run: Callable[[], None]) -> Callable[[], None]:
        return run if self._streams is None else lambda: self._issue(run)

    def _issue(self, run: Callable[[], None]) -> None:
        """Puts an operation on the stream. Its deadline is the business of who watches the stream."""
        assert self._streams is not None
        self.check_fault()
        try:
            run()
        except _TableFault as error:
            raise self.failure(error, []) from error

    def run(self, call: Call) -> None:
        with self.on_device(self._device):
            if call.name == "broadcast":
                self._pipe.broadcast(call.outputs[0], call.root, self._stream())
            elif call.name == "barrier":
                self._pipe.barrier(self._stream())
            else:
                self._swap(*_shares(call, self._rank, self._size))

    def _swap(self, ins: dict[int, torch.Tensor], outs: dict[int, torch.Tensor]) -> None:
        """`ins`: what goes to each rank. Nothing is sent for what is empty, which both ends know."""
        if self._rank in ins:
            self._copy(outs[self._rank], ins[self._rank])
        outgoing = {r: [t] for r, t in ins.items() if r != self._rank and t.numel()}
        incoming = {r: [t] for r, t in outs.items() if r != self._rank and t.numel()}
        self._pipe.move(outgoing, incoming, self._stream())

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[torch.Tensor]] = {}
        for send, peer, tensor in messages:
            (outgoing if send else incoming).setdefault(peer, []).append(tensor)

        def move() -> None:
            with self.on_device(self._device):
                self._pipe.move(outgoing, incoming, self._stream())

        if self._streams is not None:
            self._issue(move)
            return
        with self._in_messages(messages, timeout, COMPARE):
            move()


def _shares(call: Call, rank: int, size: int) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """What a call moves, from this rank and to it, by the other rank."""
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


def _by_rank(tensors: list[torch.Tensor], splits: list[int] | None, size: int) -> dict[int, torch.Tensor]:
    return dict(enumerate(parts_of(tensors, splits, size)))


class NvshmemBackend(ShmemBackend):
    """NVIDIA's library."""

    name = "nvshmem"
    library = "NVSHMEM"
    vendor = NVSHMEM


class RocshmemBackend(ShmemBackend):
    """AMD's library, as `unicomm build rocshmem` has built it."""

    name = "rocshmem"
    library = "rocSHMEM"
    vendor = ROCSHMEM
