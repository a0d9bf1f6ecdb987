"""The communicator of NCCL and RCCL: one `ncclComm_t`, made at creation, used on the current stream.

Here is its life and its memory; operations.py has what it does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch

from unicomm.backends.bootstrap import addresses, host_identity
from unicomm.backends.vendor.device_runtime import copies
from unicomm.comms.backend import (
    AllocatesMemory,
    Capabilities,
    ChoosesDevice,
    HasOneSided,
    HasSymmetricMemory,
    OneSided,
    PreviousEpoch,
    RegistersMemory,
    ReportsMemory,
    ReusesEpochs,
    Setup,
    SplitsInLibrary,
    SurvivesFork,
)
from unicomm.comms.errors import BackendError, CommError, PeerLostError
from unicomm.comms.execution.device import graphs
from unicomm.comms.streams import Streams, TorchStreams, numbered

from . import succession, symmetric, types
from .causes import known_cause
from .errors import IN_PROGRESS, SUCCESS, aborted, fault_error, log_text
from .hints import HINTS, settings_of, signals_of
from .library import NCCL, RCCL, Library, Vendor, open_library, version_text
from .making import ABORTS, NOBODY, Maker
from .memory import Memory, PoolMemory, Registrations, Windows, memory_of
from .operations import OWN, Operations, calls_of

_HERE = contextlib.nullcontext()
_ENDS = 20.0  # seconds that the end of a communicator is waited for
_WITH_GRAPHS = 0.1  # the same where that may be for ever
_log = logging.getLogger("unicomm")


class NcclBackend(
    Operations,
    ChoosesDevice,
    AllocatesMemory,
    RegistersMemory,
    HasOneSided,
    HasSymmetricMemory,
    ReportsMemory,
    SplitsInLibrary,
    ReusesEpochs,
    SurvivesFork,
):
    """See the module. A test's double is this class with another library, streams and device."""

    name = "nccl"
    protocol_version = 1
    vendor: ClassVar[Vendor] = NCCL
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        operations=OWN,
        reductions=types.reductions(fp8=False),
        hints=HINTS,
    )

    # --- what a double replaces ----------------------------------------------------------------------------

    @classmethod
    def library(cls) -> Library:
        return open_library(cls.vendor)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams:
        return TorchStreams(device)

    @classmethod
    def on_device(cls, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within, the library's calls of this thread are for that device."""
        if torch.cuda.current_device() == device.index:
            return _HERE
        return torch.cuda.device(device)

    @classmethod
    def device_memory(cls, library: Library, device: torch.device) -> Memory:
        """The library's memory for tensors of that device."""
        return PoolMemory(library, device)

    @classmethod
    def fp8(cls, library: Library, device: torch.device) -> bool:
        """Whether the library reduces float8 on that device."""
        since = cls.vendor.fp8_since
        if since is None or library.version < since:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0)

    @classmethod
    def runtime_path(cls) -> str:
        """The device's runtime library; "" for the one that is there."""
        return ""

    @classmethod
    def device_copies(cls) -> tuple[int, int, int]:
        """Addresses of functions of the device's: see `device_runtime.copies`."""
        return copies(cls.vendor.runtime, cls.runtime_path())

    # --- life ----------------------------------------------------------------------------------------------

    def __init__(self, library: Library, comm: int, setup: Setup) -> None:
        self._library = library
        self._native = library.native
        self._comm = comm
        self._rank, self._size = setup.rank, setup.size
        self._device = setup.device
        self._streams = self.device_streams(setup.device)
        self._symmetric = setup.hints["symmetric"]
        self._splits = setup.hints["split_by"] == "split" and library.has("CommSplit")
        self.splits_when_idle = self._splits
        self._token = torch.zeros(1, dtype=torch.uint8, device=setup.device)
        self._lock = threading.Lock()
        self._aborted = False
        self._began = library.listen()
        self._uid = setup.rendezvous.uid
        # One that may be reconfigured is revoked instead of aborted, so that it can be shrunk after that.
        shrinks = library.has("CommShrink") and setup.hints["reconfigure_by"] == "shrink"
        self._revokes = setup.reconfigurable and shrinks and library.has("CommRevoke")
        self._revoked = 0
        self._shrinks = shrinks
        operations = OWN
        for function, operation in (
            ("AlltoAll", "all_to_all_single"),
            ("Gather", "gather_single"),
        ):
            if library.has(function):
                operations |= {operation}
        self.capabilities = replace(
            self.capabilities,
            operations=operations,
            reductions=types.reductions(self.fp8(library, setup.device)),
        )
        self._direct = types.direct(self.capabilities.reductions)
        self._calls = calls_of(self._native, operations, setup.size)
        self._memory = memory_of(library, setup.device, self.device_memory)
        self._registrations = Registrations(library, self._memory)
        self._windows = Windows(self, self._registrations, signals_of(setup.hints, library))

    @classmethod
    def which_device(cls, device: torch.device) -> torch.device:
        return numbered(device)

    @classmethod
    def connect(cls, setup: Setup) -> NcclBackend:
        library = cls.library()
        settings = settings_of(setup.hints, setup.name, library)
        maker = cls._maker(library, setup.device, settings, setup.timeout)
        parent = setup.parent
        if isinstance(parent, NcclBackend) and parent._splits:
            comm = maker.split(parent._alive(), setup.color, setup.rank)
        elif setup.reconfiguring and (plan := succession.agreed(setup, library)) is not None:
            comm = succession.make(plan, setup, library, maker)
        else:
            comm = maker.new(setup.rendezvous, setup.rank, setup.size, setup.hints["large_world"])
        return cls(library, comm, setup)

    @classmethod
    def _maker(
        cls, library: Library, device: torch.device, settings: Sequence[tuple[str, Any]], timeout: float
    ) -> Maker:
        return Maker(library, lambda: cls.on_device(device), settings, timeout)

    def split_away(self, timeout: float) -> None:
        if self._splits:
            self._maker(self._library, self._device, [], timeout).split(self._alive(), NOBODY, 0)

    def streams(self) -> Streams:
        return self._streams

    def close(self) -> None:
        with self._lock:
            comm, self._comm = self._comm, 0
            revoked, self._revoked = self._revoked, 0
        if revoked:
            with self.on_device(self._device):
                self._native.abort(revoked, ABORTS)
        if not comm:
            return
        with self.on_device(self._device):
            self._registrations.close(comm)
            waits = self._patience(_ENDS)
            result = self._native.end(comm, waits)
            if result == IN_PROGRESS and waits == _ENDS:
                _log.warning("%s has not ended a communicator in %g s; it goes on", self.vendor.title, waits)
            self._library.check("CommDestroy", result)

    def _patience(self, seconds: float) -> float:
        """How long an end is waited for: the library lets it last until the graphs are gone that have
        captured its operations."""
        return seconds if graphs.alive(self._streams) == 0 else _WITH_GRAPHS

    def _settle(self, comm: int) -> None:
        """With blocking=0 a call goes on by itself."""
        end = time.monotonic() + 5.0
        while self._native.async_error(comm) == (SUCCESS, IN_PROGRESS) and time.monotonic() < end:
            time.sleep(0.001)

    def abort(self) -> None:
        # A call of the library may be under way in another thread, and this is what ends it.
        locked = self._lock.acquire(timeout=0.2)
        try:
            comm, self._comm = self._comm, 0
            self._aborted = True
            if comm:
                with self.on_device(self._device):
                    if self._revokes and self._revoke(comm):
                        self._revoked = comm
                    else:
                        # It tells the device first; what it waits for after that must not keep the
                        # watchdog, which has the other communicators to end.
                        self._native.abort(comm, self._patience(ABORTS))
        finally:
            if locked:
                self._lock.release()
        self._registrations.close(0)

    def _revoke(self, comm: int) -> bool:
        """Ends what runs on it, here; it stays as something to shrink."""
        result = self._native.revoke(comm, 0)
        if result == IN_PROGRESS:
            self._settle(comm)
            result = self._native.async_error(comm)[1]
        return bool(result == SUCCESS)

    @property
    def can_reuse_epoch(self) -> bool:
        return self._shrinks

    def take_epoch(self) -> PreviousEpoch | None:
        with self._lock:
            comm, clean = (self._comm, True) if self._comm else (self._revoked, False)
            if not comm or not self._shrinks:
                return None
            self._comm = self._revoked = 0
        device = self._device
        with self.on_device(device):
            self._registrations.close(comm if clean else 0)
        return succession.Parent(
            self._library, lambda: self.on_device(device), comm, self._uid, self._rank, self._size, clean
        )

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return addresses.of_interface(addresses.chosen_interface()) or addresses.here(None).address

    def forget(self) -> None:
        self._comm = 0

    def late_error(self) -> CommError | None:
        with self._lock:
            if not self._comm:
                return aborted()
            asked, state = self._native.async_error(self._comm)
            result = asked if asked != SUCCESS else state
            if result in (SUCCESS, IN_PROGRESS):
                self._library.trim_log()
                return None
            return self._library.error("operation", result, self._comm, self._began)

    def explain(self, error: CommError) -> None:
        with self._lock:
            _, lines = self._library.said(self._comm, self._began)
        error.message += log_text(self.vendor.title, lines)
        error.hint = known_cause("\n".join(lines)) or error.hint

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        error = fault_error(self.vendor.title, fault, timeout)
        if isinstance(error, (BackendError, PeerLostError)):
            self.explain(error)
        raise error

    def memory(self) -> dict[str, int]:
        if not self._comm or not self._library.has("CommMemStats"):
            return {}
        result, total = self._native.mem_stats(self._comm, 0)
        return {"library": total} if result == SUCCESS else {}

    def host(self) -> str:
        return host_identity().split(" ", 1)[1]  # its name may differ between containers of one host

    def symmetric_table(self, one_host: bool = True) -> Any:
        return symmetric.table_of(self, self._symmetric, one_host)

    # --- memory --------------------------------------------------------------------------------------------

    def check_allocates(self) -> None:
        self._library.need("MemAlloc", "allocates")

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._memory.allocate(nbytes)

    def allocated_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device and self._memory.block_of(tensor)[0] != 0

    def bytes_allocated(self) -> int:
        return self._memory.in_use()

    def memory_pool(self) -> Any | None:
        return self._memory.pool

    def registered_range(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        if symmetric:
            self._library.need("CommWindowRegister", "symmetric")
        else:
            self._library.need("CommRegister", "registers")
        return self._registrations.range_of(tensor, symmetric)

    def register(self, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        with self.on_device(self._device):
            self._registrations.add(self._alive(), tensor, symmetric, timeout)

    def deregister(self, tensor: torch.Tensor) -> None:
        with self.on_device(self._device):
            self._registrations.remove(self._alive(), tensor)

    def one_sided(self) -> OneSided:
        self._library.need("PutSignal", "windows")
        self._library.need("CommWindowRegister", "windows")
        return self._windows

    @classmethod
    def version(cls) -> str:
        return version_text(cls.library().version)


class RcclBackend(NcclBackend):
    """AMD's library: the same interface, another file."""

    name = "rccl"
    vendor = RCCL


__all__ = ["NcclBackend", "RcclBackend"]
