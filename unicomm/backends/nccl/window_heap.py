"""Symmetric memory on a window of NCCL's or RCCL's: a heap of the library's memory on each rank.

The window is registered once, when the memory is initialised, with the communicator that is there;
allocations are parts of it (csrc/symm/tables/nccl_windows.hpp has what can be done with them). Signals have an index
of the library's to themselves, as each window has: see comms/memory/library_window.py.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from unicomm import _core
from unicomm.comms.errors import CommTimeoutError, InvalidArgumentError
from unicomm.comms.operations.reduction import RedOpType

from . import types
from .errors import SUCCESS
from .memory import SYMMETRIC, open_window

if TYPE_CHECKING:
    from .backend import NcclBackend

_DEFAULT_HEAP = 1 << 28  # device memory is there from the beginning
_NEEDS = ("MemAlloc", "CommWindowRegister", "PutSignal", "GetPeerDevicePointer")


class WindowTable:
    """The table for one communicator, as `_core.SymmTable` is for one library."""

    name = "NCCL windows"

    def __init__(self, backend: NcclBackend, one_host: bool) -> None:
        """Raises `UnsupportedError` where the library is too old."""
        for function in _NEEDS:
            backend._library.need(function, "symmetric memory on its windows")
        self._backend = backend
        self.capabilities = 0  # known when there is memory

    def unique_id(self, world: int, heap_bytes: int) -> tuple[None, bytes]:
        """What the ranks have to be told is the size alone: the communicator is there."""
        return None, (heap_bytes or _DEFAULT_HEAP).to_bytes(128, sys.byteorder)

    def discard_id(self, uid: bytes) -> None:
        """Nothing was made for it."""

    def init(self, uid: bytes, rank: int, world: int, name: str, timeout: float) -> tuple[None, Any]:
        """Collective. Raises what the library says, and `InvalidArgumentError` on all ranks where one has no
        memory for it."""
        backend = self._backend
        library, native = backend._library, backend._native
        reserve = _core.symm_nccl_windows_reserve(world)
        nbytes = int.from_bytes(uid, sys.byteorder) + reserve
        with backend.on_device(backend._device):
            comm = backend._alive()
            result, memory = native.mem_alloc(nbytes)
            if not self._all_have(result == SUCCESS, time.monotonic() + timeout):
                own = "this rank" if result != SUCCESS else "another one"
                if memory:
                    native.mem_free(memory)
                raise InvalidArgumentError(
                    f"no memory for a symmetric heap of {nbytes} bytes on all ranks ({own})",
                    hint="ask for fewer heap_bytes; torch holds unused memory: torch.cuda.empty_cache()",
                )
            try:
                window = open_window(library, comm, memory, nbytes, SYMMETRIC, timeout)
            except BaseException:
                native.mem_free(memory)
                raise
            index = backend._windows.take_index()
            domain = _core.symm_nccl_windows(
                native,
                comm,
                window,
                memory,
                nbytes,
                rank,
                world,
                -1 if index is None else index,
                *backend.device_copies(),
            )
        self.capabilities = domain.capabilities
        backend._registrations.heaps.append(domain)
        return None, domain

    def _all_have(self, good: bool, deadline: float) -> bool:
        backend = self._backend
        streams = backend.streams()
        flag = torch.tensor([good], dtype=torch.uint8, device=backend._device)
        least = types.op_number(RedOpType.MIN)
        place = flag.data_ptr()
        backend._do(
            "AllReduce",
            backend._native.all_reduce(
                place, place, 1, types.BYTE, least, backend._alive(), backend._stream()
            ),
        )
        done = streams.record(streams.current())
        while not streams.is_over(done):
            if (error := backend.late_error()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise CommTimeoutError(
                    "the ranks did not meet for symmetric memory",
                    hint="call unicomm.symm.init(comm) on all ranks",
                )
            time.sleep(50e-6)
        return bool(flag[0])
