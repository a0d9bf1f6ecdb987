"""Memory for tensors that the library allocates, its registration, and windows on it.

The GPUs of other ranks can map memory of ncclMemAlloc. torch's caching allocator uses it through a pool, so
that tensors are freed in stream order as all others. A block is one allocation of the library, in which torch
may place several tensors. The library registers whole blocks.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import os
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.c10d.compat import custom_allocator
from unicomm.comms.backend import OneSided
from unicomm.comms.errors import BackendError, CommError, InvalidArgumentError, UnsupportedError

from . import type_codes
from .handle import Handle
from .library import Library, not_in_time
from .result_codes import IN_PROGRESS

Copies = Callable[[], tuple[int, int, int]]  # returns functions of the device: see `device_runtime.copies`
_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)
_LAST_ERROR = ctypes.CFUNCTYPE(ctypes.c_int)
MOST_STAGED = 256 << 20  # bytes of a put that is copied first: each window takes so much more at most
_BY_ADDRESS = 4  # cudaMemcpyDefault and hipMemcpyDefault
ALIGNMENT = 4096  # of the first byte of a window
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: all ranks register the memory and use it at the same offset


class TensorMemory(abc.ABC):
    """A library's memory for tensors on one device of this process."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.device = device

    @property
    @abc.abstractmethod
    def pool(self) -> Any:
        """A `torch.cuda.MemPool` of the library's memory."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns a uint8 tensor in this memory. Raises `BackendError` when there is not enough."""

    def block_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns (address, bytes) of the block that holds the whole tensor; zeros if none does."""
        at, nbytes = self.library.native.block_of(tensor.data_ptr())
        inside = tensor.data_ptr() + tensor.nbytes <= at + nbytes
        return (at, nbytes) if inside else (0, 0)

    def in_use(self) -> int:
        """Returns the number of bytes that the library has allocated for this process."""
        return int(self.library.native.bytes_in_use())


class PoolMemory(TensorMemory):
    """Memory for tensors of torch.cuda, through a pool of torch's allocator."""

    _pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None:
            functions = self.library.native.allocator()
            with torch.cuda.device(self.device):
                self._pool = torch.cuda.MemPool(custom_allocator(*functions))
        return self._pool

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            with torch.cuda.device(self.device), torch.cuda.use_mem_pool(self.pool):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise BackendError(
                f"{self.library.vendor.title} has no {nbytes} bytes for a tensor: {error}".partition("\n")[0],
                hint="free tensors; torch's default pool may hold unused memory: torch.cuda.empty_cache()",
            ) from None


_memories: dict[tuple[int, torch.device], TensorMemory] = {}
_lock = threading.Lock()


def tensor_memory(
    library: Library, device: torch.device, create: Callable[[Library, torch.device], TensorMemory]
) -> TensorMemory:
    """Returns the memory of that library and device.

    It is kept until the process ends, because torch may hold its blocks that long.
    """
    with _lock:
        key = (id(library), device)
        if key not in _memories:
            _memories[key] = create(library, device)
        return _memories[key]


@dataclass
class _Registered:
    """A registered block, and the number of the user's registered tensors in it."""

    handle: int
    tensors: int = 1


class Registrations:
    """The memory that one communicator has registered. Users register tensors, the library blocks.

    Attributes:
        heaps: domains of symmetric memory, each with a window of its own.
        windows: the user's open windows, by the addresses that the library gave them.
    """

    def __init__(self, handle: Handle, memory: TensorMemory) -> None:
        self._handle = handle
        self._library = handle.library
        self._native = handle.native
        self._memory = memory
        self._blocks: dict[tuple[int, int, bool], _Registered] = {}
        self._tensors: dict[int, tuple[torch.Tensor, tuple[int, int, bool]]] = {}
        self.heaps: list[Any] = []
        self.windows: dict[int, _OpenWindow] = {}

    def sends(self, tensor: torch.Tensor) -> bool:
        """Returns whether one-sided operations can send a tensor: whether all of it is in a window."""
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        blocks = [(at, nbytes) for at, nbytes, symmetric in list(self._blocks) if symmetric]
        blocks += [(window.at, window.nbytes) for window in list(self.windows.values())]
        return any(at <= first and end <= at + nbytes for at, nbytes in blocks)

    def range_of(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        """Returns (address, bytes) of the memory to register for a tensor. Raises `InvalidArgumentError`."""
        if not tensor.nbytes:
            raise InvalidArgumentError("the tensor has no elements", hint="there is nothing to register")
        at, nbytes = self._memory.block_of(tensor)
        if at:
            return at, nbytes
        if symmetric and tensor.data_ptr() % ALIGNMENT:
            raise InvalidArgumentError(
                f"the tensor is not {self._library.vendor.title}'s memory, and begins at no multiple of"
                f" {ALIGNMENT} bytes",
                hint="allocate it with comm.mem_allocator.empty(...), or within the allocator's pool",
            )
        return tensor.data_ptr(), tensor.nbytes

    def add(self, comm: int, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        """Registers the tensor's block unless it is registered. With `symmetric`, the call is collective."""
        if tensor.data_ptr() in self._tensors:
            raise InvalidArgumentError("the tensor is registered already", hint="deregister it first")
        key = (*self.range_of(tensor, symmetric), symmetric)
        if key in self._blocks:
            self._blocks[key].tensors += 1
        else:
            self._blocks[key] = _Registered(self._register(comm, key, timeout))
        self._tensors[tensor.data_ptr()] = (tensor, key)

    def _register(self, comm: int, key: tuple[int, int, bool], timeout: float) -> int:
        at, nbytes, symmetric = key
        if symmetric:
            return open_window(self._handle, comm, at, nbytes, SYMMETRIC, timeout)
        result, handle = self._native.register(comm, at, nbytes)
        self._library.check("CommRegister", result, comm)
        return int(handle)

    def remove(self, comm: int, tensor: torch.Tensor) -> None:
        entry = self._tensors.pop(tensor.data_ptr(), None)
        if entry is None:
            raise InvalidArgumentError(
                "the tensor is not registered", hint="pass the tensor that was registered"
            )
        key = entry[1]
        block = self._blocks[key]
        block.tensors -= 1
        if not block.tensors:
            del self._blocks[key]
            self._deregister(comm, key, block.handle)

    def _deregister(self, comm: int, key: tuple[int, int, bool], handle: int) -> None:
        function = "window_deregister" if key[2] else "deregister"
        self._library.check(function, getattr(self._native, function)(comm, handle), comm)

    def stop(self) -> None:
        """Refuses calls on symmetric memory, whose communicator is about to be freed."""
        for heap in self.heaps:
            heap.abort()

    def close(self, comm: int) -> None:
        """Deregisters everything before the communicator ends. `comm` is 0 after an abort."""
        blocks, self._blocks = self._blocks, {}
        heaps, self.heaps = self.heaps, []
        for heap in heaps:
            heap.leave() if comm else heap.abort()
        if comm:
            for key, block in blocks.items():
                self._deregister(comm, key, block.handle)
            # After an abort the device may still be in them, so their memory goes with this object.
            windows, self.windows = self.windows, {}
            for window in windows.values():
                window.staging.leave(comm)
        self._tensors.clear()


def open_window(handle: Handle, comm: int, at: int, nbytes: int, flags: int, timeout: float) -> int:
    """Registers memory that other ranks may write to, or use at the same offset. Collective."""
    library = handle.library
    since = library.start_log()
    result, window = handle.native.window_register(comm, at, nbytes, flags, timeout, handle.state)
    library.check("CommWindowRegister", result, comm, since)
    if result == IN_PROGRESS:
        raise not_in_time(library, "CommWindowRegister", timeout, since)
    if not window:
        raise UnsupportedError(
            f"{library.vendor.title} made no window: these GPUs cannot reach each other's memory",
            hint="symmetric memory needs NVLink or PCIe peers, or a network that NCCL's one-sided operations "
            "support; use collectives, or send and recv",
        )
    return int(window)


class _Staging:
    """A window's own block of the library's memory, from which puts of other memory are sent.

    The library sends only what is in a window, and to make one is collective: it cannot wait for the first
    put. One block is enough for all puts of a window, since operations of a communicator run in order.
    """

    def __init__(self, handle: Handle, comm: int, nbytes: int, timeout: float, copies: Copies) -> None:
        self._handle = handle
        self.nbytes = nbytes = min(nbytes, MOST_STAGED)
        copy, _, last_error = copies()
        self._copy, self._last_error = _COPY(copy), _LAST_ERROR(last_error)
        result, self.address = handle.native.mem_alloc(nbytes)
        handle.library.check("MemAlloc", result)
        self._memory = weakref.finalize(self, _free, handle.native, self.address, os.getpid())
        self._memory.atexit = False
        self._window = open_window(handle, comm, self.address, nbytes, SYMMETRIC, timeout)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies the tensor here, on the current stream."""
        to, stream = self.address, self._handle.stream()
        if result := self._copy(to, tensor.data_ptr(), tensor.nbytes, _BY_ADDRESS, stream):
            self._last_error()  # clears it, so that the program does not find it
            raise BackendError(
                f"copying the tensor of a put failed with the device's error {result}",
                hint="put from memory that is registered as symmetric, or see what ran on the device before",
            )

    def leave(self, comm: int) -> None:
        result = self._handle.native.window_deregister(comm, self._window)
        self._handle.library.check("CommWindowDeregister", result, comm)


@dataclass
class _OpenWindow:
    """A window, the (address, bytes) of its memory, and the block for its puts."""

    at: int
    nbytes: int
    staging: _Staging


def _free(native: Any, address: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child has no device
        native.mem_free(address)


class Windows(OneSided):
    """The library's one-sided operations, for one communicator."""

    def __init__(self, handle: Handle, registrations: Registrations, indices: int, copies: Copies) -> None:
        """`copies`: see `WindowTable`."""
        self._handle = handle
        self._registrations = registrations
        self._copies = copies
        self.indices = indices
        self.used = set()

    def range_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._registrations.range_of(tensor, True)

    def open(self, at: int, nbytes: int, timeout: float) -> int:
        handle, registrations = self._handle, self._registrations
        with handle.on_device(), handle.in_call as comm:
            staging = _Staging(handle, comm, nbytes, timeout, self._copies)
            try:
                window = open_window(handle, comm, at, nbytes, SYMMETRIC, timeout)
            except BaseException:
                with contextlib.suppress(CommError):
                    staging.leave(comm)
                raise
            registrations.windows[window] = _OpenWindow(at, nbytes, staging)
            return window

    def close(self, window: int) -> None:
        handle, registrations = self._handle, self._registrations
        with handle.on_device(), handle.in_call as comm:
            registrations.windows.pop(window).staging.leave(comm)
            result = handle.native.window_deregister(comm, window)
            handle.library.check("CommWindowDeregister", result, comm)

    def put(self, window: int, tensor: torch.Tensor, peer: int, offset: int, index: int) -> None:
        source = tensor.data_ptr()
        if not self._registrations.sends(tensor):
            staging = self._registrations.windows[window].staging
            if tensor.nbytes > staging.nbytes:
                raise InvalidArgumentError(
                    f"a put of {tensor.nbytes} bytes from memory in no window; it is sent by a copy,"
                    f" and there is room for {staging.nbytes}",
                    hint="register the tensor with symmetric=True on all ranks, or put it in parts",
                )
            with self._handle.on_device():
                staging.fill(tensor)
            source = staging.address
        place = source, tensor.nbytes, type_codes.BYTE, peer, window, offset
        self._issue("PutSignal", self._handle.native.put_signal, *place, index, 0, 0)

    def signal(self, peer: int, index: int) -> None:
        self._issue("Signal", self._handle.native.signal, peer, index, 0, 0)

    def wait(self, peer: int, index: int, count: int) -> None:
        self._issue("WaitSignal", self._handle.native.wait_signal, count, peer, index)

    def _issue(self, name: str, function: Callable[..., int], *arguments: int) -> None:
        handle = self._handle
        with handle.on_device(), handle.in_call as comm:
            try:
                handle.check(name, function(*arguments, comm, handle.stream()))
            except BackendError as error:
                if not re.search("RMA|one-sided", error.message):
                    raise
                raise UnsupportedError(
                    f"the library has no one-sided operations on these GPUs: {error.message}",
                    hint="they need NVLink or PCIe peers, or a network plugin for them; use send and recv",
                ) from None
