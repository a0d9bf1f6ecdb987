"""The backends `nccl` and `rccl`: one `ncclComm_t` for each communicator, used on the current stream.

This file has creation, end, failures and memory; collectives.py runs the operations.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch

from unicomm.backends.bootstrap import addresses, host_identity
from unicomm.backends.vendor.device_runtime import copies, ipc_table
from unicomm.backends.vendor.shmem_libraries import NVSHMEM, open_table
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
from unicomm.comms.errors import AbortedError, BackendError, CommError, PeerLostError, UnsupportedError
from unicomm.comms.streams import Streams, TorchStreams, numbered

from . import shrink_and_grow, type_codes
from .collectives import ALWAYS_NATIVE, Collectives, library_calls
from .creation import ABORT_SECONDS, NO_COLOR, Creator
from .handle import Handle
from .hints import HINTS, settings_of, signals_of
from .known_causes import known_cause
from .library import NCCL, RCCL, Library, NcclVendor, open_library, version_text
from .registered_memory import PoolMemory, Registrations, TensorMemory, Windows, tensor_memory
from .result_codes import IN_PROGRESS, SUCCESS, fault_error, log_text
from .window_table import WindowTable

_END_SECONDS = 20.0  # time that the end of a communicator is waited for
_WITH_GRAPHS_SECONDS = 0.1  # the same if graphs may delay the end forever
_REVOKE_SECONDS = 5.0
_GPU_MEM_TOTAL = 3  # ncclStatGpuMemTotal: all device memory of a communicator
_log = logging.getLogger("unicomm")


class NcclBackend(
    Collectives,
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
    """The backend `nccl`. A mock library is used by a subclass with another library, streams and memory."""

    name = "nccl"
    protocol_version = 1
    vendor: ClassVar[NcclVendor] = NCCL
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        operations=ALWAYS_NATIVE,
        reductions=type_codes.reductions(fp8=False),
        hints=HINTS,
    )

    # --- what a mock library replaces ----------------------------------------------------------------------

    @classmethod
    def library(cls) -> Library:
        return open_library(cls.vendor)

    @classmethod
    def device_streams(cls, device: torch.device) -> Streams:
        return TorchStreams(device)

    @classmethod
    def device_memory(cls, library: Library, device: torch.device) -> TensorMemory:
        return PoolMemory(library, device)

    @classmethod
    def fp8(cls, library: Library, device: torch.device) -> bool:
        """Returns whether the library reduces float8 on that device."""
        since = cls.vendor.fp8_since
        if since is None or library.version < since:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0)

    @classmethod
    def runtime_path(cls) -> str:
        """Returns the path of the device's runtime library; "" for the one that is installed."""
        return ""

    @classmethod
    def device_copies(cls) -> tuple[int, int, int]:
        """Returns addresses of functions of the device's runtime: see `device_runtime.copies`."""
        return copies(cls.vendor.runtime, cls.runtime_path())

    # --- creation and end ----------------------------------------------------------------------------------

    def __init__(self, library: Library, comm: int, setup: Setup) -> None:
        self._handle = Handle(library, comm, setup.device, self.device_streams(setup.device))
        self._rank, self._size = setup.rank, setup.size
        self._symmetric = setup.hints["symmetric"]
        self._splits = setup.hints["split_by"] == "split" and library.has("CommSplit")
        self.splits_when_idle = self._splits
        self._token = torch.zeros(1, dtype=torch.uint8, device=setup.device)
        self._uid = setup.rendezvous.uid
        # A communicator that may be reconfigured is revoked instead of aborted: it can then be shrunk.
        self._shrinks = library.has("CommShrink") and setup.hints["reconfigure_by"] == "shrink"
        self._revokes = setup.reconfigurable and self._shrinks and library.has("CommRevoke")
        self._revoked = 0  # address of the revoked `ncclComm_t`
        optional = {"AlltoAll": "all_to_all_single", "Gather": "gather_single"}
        operations = ALWAYS_NATIVE | {name for function, name in optional.items() if library.has(function)}
        self.capabilities = replace(
            self.capabilities,
            operations=operations,
            reductions=type_codes.reductions(self.fp8(library, setup.device)),
        )
        self._direct = type_codes.direct_codes(self.capabilities.reductions)
        self._calls = library_calls(library.native, operations, setup.size)
        self._memory = tensor_memory(library, setup.device, self.device_memory)
        self._registrations = Registrations(self._handle, self._memory)
        signals = signals_of(setup.hints, library)
        self._windows = Windows(self._handle, self._registrations, signals, self.device_copies)

    @classmethod
    def which_device(cls, device: torch.device) -> torch.device:
        return numbered(device)

    @classmethod
    def connect(cls, setup: Setup) -> NcclBackend:
        library = cls.library()
        settings = settings_of(setup.hints, setup.name, library)
        creator = Creator(library, setup.device, settings, setup.timeout)
        parent = setup.parent
        if isinstance(parent, NcclBackend) and parent._splits:
            comm = creator.split(parent._handle, setup.color, setup.rank)
        elif setup.reconfiguring and (plan := shrink_and_grow.agree_on_plan(setup, library)) is not None:
            comm = shrink_and_grow.create(plan, setup, library, creator)
        else:
            comm = creator.new(setup, setup.hints["large_world"])
        return cls(library, comm, setup)

    def split_away(self, timeout: float) -> None:
        if self._splits:
            handle = self._handle
            Creator(handle.library, handle.device, [], timeout).split(handle, NO_COLOR, 0)

    def streams(self) -> Streams:
        return self._handle.streams

    def close(self) -> None:
        handle = self._handle
        with handle.lock:
            comm = handle.take()
            revoked, self._revoked = self._revoked, 0
        handle.await_calls()
        with handle.on_device():
            if revoked:
                handle.library.abort(revoked, handle.device, ABORT_SECONDS)
            if not comm:
                return
            self._registrations.close(comm)
            limit = self._limit(_END_SECONDS)
            result = handle.library.end(comm, handle.device, limit)
            if result == IN_PROGRESS and limit == _END_SECONDS:
                title = self.vendor.title
                _log.warning("%s has not ended a communicator in %g s; its end goes on", title, limit)
            handle.library.check("CommDestroy", result)

    def _limit(self, seconds: float) -> float:
        """Returns how long to wait for the end of a communicator.

        The library keeps it until all graphs are gone that have captured its operations.
        """
        return seconds if self._handle.streams.graphs_alive() == 0 else _WITH_GRAPHS_SECONDS

    def abort(self) -> None:
        # Another thread may hold the lock in a call of the library, which the abort is to end.
        handle = self._handle
        locked = handle.lock.acquire(timeout=0.2)
        try:
            comm = handle.take()
            self._registrations.stop()
            if comm and self._revokes:
                self._revoke(comm)
            elif comm:
                self._free(comm)
        finally:
            if locked:
                handle.lock.release()
        self._registrations.close(0)

    def _revoke(self, comm: int) -> None:
        """Ends the operations of this rank. Keeps the communicator for a shrink if that succeeds in time."""
        result = self._handle.library.revoke(comm, self._handle.device, _REVOKE_SECONDS)
        if result == SUCCESS:
            self._revoked = comm
        elif result != IN_PROGRESS:
            self._free(comm)

    def _free(self, comm: int) -> None:
        """Aborts the communicator, which ends kernels and calls on the host."""
        handle = self._handle
        handle.await_calls()
        # What the library waits for then must not keep the watchdog, which has other communicators to end.
        handle.library.abort(comm, handle.device, self._limit(ABORT_SECONDS))

    @property
    def can_reuse_epoch(self) -> bool:
        return self._shrinks

    def take_epoch(self) -> PreviousEpoch | None:
        handle = self._handle
        with handle.lock:
            comm, clean = (handle.comm, True) if handle.comm else (self._revoked, False)
            if not comm or not self._shrinks:
                return None
            handle.comm = self._revoked = 0
        with handle.on_device():
            self._registrations.close(comm if clean else 0)
        return shrink_and_grow.Parent(
            handle.library, handle.device, comm, self._uid, self._rank, self._size, clean
        )

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return addresses.of_interface(addresses.chosen_interface()) or addresses.here(None).address

    def forget(self) -> None:
        self._handle.comm = 0

    # --- failures ------------------------------------------------------------------------------------------

    def late_error(self) -> CommError | None:
        return self._handle.late_error()

    def explain(self, error: CommError) -> None:
        handle = self._handle
        with handle.lock:
            _, lines = handle.library.last_error(handle.comm, handle.log_position)
        error.message += log_text(self.vendor.title, lines)
        error.hint = known_cause("\n".join(lines)) or error.hint

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        error = fault_error(self.vendor.title, fault, timeout)
        if isinstance(error, (BackendError, PeerLostError)):
            self.explain(error)
        raise error

    # --- symmetric memory ----------------------------------------------------------------------------------

    def host(self) -> str:
        return host_identity().split(" ", 1)[1]  # without the name, which containers of one host may change

    def symmetric_table(self, one_host: bool = True) -> Any:
        kind = self._symmetric
        if kind == "auto":
            kind = "cuda_ipc" if one_host else "windows"
        if kind == "windows":
            return WindowTable(self._handle, self._windows, self._registrations, self.device_copies)
        if kind == "nvshmem":
            return open_table(NVSHMEM)
        if not one_host:
            raise UnsupportedError(
                "the ranks are on several hosts, whose devices cannot open each other's memory",
                hint="use the hint symmetric=windows, the backend 'nvshmem', or split by hosts: comm.split",
            )
        return ipc_table(self.vendor.runtime, self.runtime_path())

    # --- memory --------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        handle = self._handle
        if handle.library.has("CommMemStats"):
            with contextlib.suppress(AbortedError), handle.lock, handle.in_call as comm:
                result, total = handle.native.mem_stats(comm, _GPU_MEM_TOTAL)
                if result == SUCCESS:
                    return {"library": total}
        return {}

    def check_allocates(self) -> None:
        self._handle.library.require("MemAlloc", "allocating memory")

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self._memory.allocate(nbytes)

    def allocated_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._handle.device and self._memory.block_of(tensor)[0] != 0

    def bytes_allocated(self) -> int:
        return self._memory.in_use()

    def memory_pool(self) -> Any | None:
        return self._memory.pool

    def registered_range(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        if symmetric:
            self._handle.library.require("CommWindowRegister", "symmetric registration")
        else:
            self._handle.library.require("CommRegister", "registering memory")
        return self._registrations.range_of(tensor, symmetric)

    def register(self, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        with self._handle.on_device(), self._handle.in_call as comm:
            self._registrations.add(comm, tensor, symmetric, timeout)

    def deregister(self, tensor: torch.Tensor) -> None:
        with self._handle.on_device(), self._handle.in_call as comm:
            self._registrations.remove(comm, tensor)

    def one_sided(self) -> OneSided:
        for function in ("PutSignal", "CommWindowRegister", "MemAlloc"):
            self._handle.library.require(function, "a window")
        return self._windows

    @classmethod
    def version(cls) -> str:
        return version_text(cls.library().version)


class RcclBackend(NcclBackend):
    """The backend `rccl`: AMD's library, which has the same interface."""

    name = "rccl"
    vendor = RCCL
