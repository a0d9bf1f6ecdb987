"""Symmetric memory on a window of NCCL or RCCL: a heap of the library's memory on each rank.

The window is registered once, when symmetric memory is initialised, with the existing communicator.
Allocations are parts of it; csrc/symm/tables/nccl_windows.hpp says which operations it has. Its signals have
a signal index of their own, as each window has: see comms/memory/library_window.py.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from unicomm import _core
from unicomm.comms.errors import CommTimeoutError, InvalidArgumentError
from unicomm.comms.operations.reduction import RedOpType

from . import type_codes
from .handle import Handle
from .registered_memory import SYMMETRIC, Copies, Registrations, Windows, open_window
from .result_codes import SUCCESS

_DEFAULT_HEAP = 1 << 28  # device memory is allocated as a whole at once
_NEEDS = ("MemAlloc", "CommWindowRegister", "PutSignal", "GetPeerDevicePointer")


class WindowTable:
    """A table of symmetric memory, as `_core.SymmTable` is, for one communicator."""

    name = "NCCL windows"

    def __init__(
        self,
        handle: Handle,
        windows: Windows,
        registrations: Registrations,
        copies: Copies,
    ) -> None:
        """`copies` returns functions of the device: see `device_runtime.copies`.

        Raises `UnsupportedError` if the library is too old.
        """
        for function in _NEEDS:
            handle.library.require(function, "symmetric memory on its windows")
        self._handle, self._windows, self._registrations = handle, windows, registrations
        self._copies = copies
        self.capabilities = 0  # known after `init`

    def unique_id(self, world: int, heap_bytes: int) -> tuple[None, bytes]:
        """Returns the size of the heap as an ID. The ranks need no other, since they have a communicator."""
        return None, (heap_bytes or _DEFAULT_HEAP).to_bytes(128, sys.byteorder)

    def discard_id(self, uid: bytes) -> None:
        """Does nothing: no resource belongs to an ID."""

    def init(self, uid: bytes, rank: int, world: int, name: str, timeout: float) -> tuple[None, Any]:
        """Allocates and registers the heap; returns (None, domain). Collective.

        Raises the library's error, and `InvalidArgumentError` on all ranks if one rank lacks memory.
        """
        handle = self._handle
        native = handle.native
        nbytes = int.from_bytes(uid, sys.byteorder) + _core.symm_nccl_windows_reserve(world)
        with handle.on_device(), handle.in_call as comm:
            result, memory = native.mem_alloc(nbytes)
            if not self._all_succeeded(result == SUCCESS, time.monotonic() + timeout):
                where = "this rank" if result != SUCCESS else "another rank"
                if memory:
                    native.mem_free(memory)
                raise InvalidArgumentError(
                    f"{where} has no memory for a symmetric heap of {nbytes} bytes",
                    hint="ask for fewer heap_bytes; torch holds unused memory: torch.cuda.empty_cache()",
                )
            try:
                window = open_window(handle, comm, memory, nbytes, SYMMETRIC, timeout)
            except BaseException:
                native.mem_free(memory)
                raise
            index = self._windows.take_index()
            domain = _core.symm_nccl_windows(
                native,
                comm,
                window,
                memory,
                nbytes,
                rank,
                world,
                -1 if index is None else index,
                *self._copies(),
            )
        self.capabilities = domain.capabilities
        self._registrations.heaps.append(domain)
        return None, domain

    def _all_succeeded(self, success: bool, deadline: float) -> bool:
        """Returns whether all ranks pass True. Collective."""
        handle = self._handle
        flag = torch.tensor([success], dtype=torch.uint8, device=handle.device)
        place, minimum = flag.data_ptr(), type_codes.op_code(RedOpType.MIN)
        with handle.in_call as comm:
            stream = handle.stream()
            result = handle.native.all_reduce(place, place, 1, type_codes.BYTE, minimum, comm, stream)
            handle.check("AllReduce", result, deadline)
        done = handle.streams.record(handle.streams.current())
        while not handle.streams.is_over(done):
            if (error := handle.late_error()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    "not all ranks initialised symmetric memory in time",
                    hint="call unicomm.symm.init(comm) on all ranks",
                )
            time.sleep(50e-6)
        return bool(flag[0])
