"""Memory of the library, and what a communicator registers with it.

What ncclMemAlloc gives can be mapped by the other ranks' GPUs. torch's caching allocator takes it through a
pool, so that tensors there are freed in the order of streams as all others. A block is what the library gave
at a time, of which torch may make several tensors: the library registers blocks, never parts of them.
"""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unicomm.comms.backend import OneSided
from unicomm.comms.errors import BackendError, InvalidArgumentError, UnsupportedError

from . import types
from .errors import IN_PROGRESS
from .library import Library, not_in_time

ALIGNMENT = 4096  # of a window's beginning
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: all ranks register it, and use it in collectives at the same offset


class Memory(abc.ABC):
    """A library's memory for tensors on one device of this process."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.device = device

    @property
    @abc.abstractmethod
    def pool(self) -> Any:
        """A `torch.cuda.MemPool` whose memory is the library's."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """A tensor of bytes there. Raises `BackendError` when there is not enough."""

    def block_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(address, bytes) of the block that holds all of the tensor; zeros when none does."""
        at, nbytes = self.library.native.block_of(tensor.data_ptr())
        inside = tensor.data_ptr() + tensor.nbytes <= at + nbytes
        return (at, nbytes) if inside else (0, 0)

    def in_use(self) -> int:
        """Bytes that the library has given to this process and not got back."""
        return int(self.library.native.bytes_in_use())


class PoolMemory(Memory):
    """For tensors of torch.cuda."""

    _made: Any = None

    @property
    def pool(self) -> Any:
        if self._made is None:
            functions = self.library.native.allocator()
            with torch.cuda.device(self.device):
                self._made = torch.cuda.MemPool(torch._C._cuda_customAllocator(*functions))
        return self._made

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            with torch.cuda.device(self.device), torch.cuda.use_mem_pool(self.pool):
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise BackendError(
                f"{self.library.vendor.title} has no {nbytes} bytes for a tensor: {error}".partition("\n")[0],
                hint="free tensors; torch's own pool may hold memory: torch.cuda.empty_cache()",
            ) from None


_memories: dict[tuple[int, torch.device], Memory] = {}
_lock = threading.Lock()


def memory_of(
    library: Library, device: torch.device, make: Callable[[Library, torch.device], Memory]
) -> Memory:
    """The one for that library and device, kept for good: torch may hold its blocks that long."""
    with _lock:
        key = (id(library), device)
        if key not in _memories:
            _memories[key] = make(library, device)
        return _memories[key]


@dataclass
class _Registered:
    """A block that the library knows, and how many tensors of the user's are in it."""

    handle: int
    tensors: int = 1


class Registrations:
    """What one communicator has registered: blocks, by the tensors that lie in them."""

    def __init__(self, library: Library, memory: Memory) -> None:
        self._library = library
        self._native = library.native
        self._memory = memory
        self._blocks: dict[tuple[int, int, bool], _Registered] = {}
        self._tensors: dict[int, tuple[torch.Tensor, tuple[int, int, bool]]] = {}
        self.heaps: list[Any] = []  # of symmetric memory, each with its window

    def range_of(self, tensor: torch.Tensor, symmetric: bool) -> tuple[int, int]:
        """(address, bytes) of what has to be registered for the tensor. Raises `InvalidArgumentError`."""
        if not tensor.nbytes:
            raise InvalidArgumentError("the tensor has no elements", hint="there is nothing to register")
        at, nbytes = self._memory.block_of(tensor)
        if at:
            return at, nbytes
        if symmetric and tensor.data_ptr() % ALIGNMENT:
            raise InvalidArgumentError(
                f"the tensor is not {self._library.vendor.title}'s memory, and begins at no multiple of"
                f" {ALIGNMENT} bytes",
                hint="make it with comm.mem_allocator.empty(...), or within its pool",
            )
        return tensor.data_ptr(), tensor.nbytes

    def add(self, comm: int, tensor: torch.Tensor, symmetric: bool, timeout: float) -> None:
        """Registers the tensor's block, unless it is. With `symmetric` the call is collective."""
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
            return open_window(self._library, comm, at, nbytes, SYMMETRIC, timeout)
        result, handle = self._native.register(comm, at, nbytes)
        self._library.check("CommRegister", result, comm)
        return int(handle)

    def remove(self, comm: int, tensor: torch.Tensor) -> None:
        entry = self._tensors.pop(tensor.data_ptr(), None)
        if entry is None:
            raise InvalidArgumentError(
                "the tensor is not registered", hint="pass the one that was registered"
            )
        key = entry[1]
        block = self._blocks[key]
        block.tensors -= 1
        if not block.tensors:
            del self._blocks[key]
            self._forget(comm, key, block.handle)

    def _forget(self, comm: int, key: tuple[int, int, bool], handle: int) -> None:
        what = "window_deregister" if key[2] else "deregister"
        self._library.check(what, getattr(self._native, what)(comm, handle), comm)

    def close(self, comm: int) -> None:
        """Before the communicator's end, with `comm` 0 after its abort."""
        blocks, self._blocks = self._blocks, {}
        heaps, self.heaps = self.heaps, []
        for heap in heaps:
            heap.leave() if comm else heap.abort()
        if comm:
            for key, block in blocks.items():
                self._forget(comm, key, block.handle)
        self._tensors.clear()


def open_window(library: Library, comm: int, at: int, nbytes: int, flags: int, timeout: float) -> int:
    """Collective: registers memory that the other ranks may write to, or use at the same offset."""
    since = library.listen()
    result, window = library.native.window_register(comm, at, nbytes, flags, timeout)
    library.check("CommWindowRegister", result, comm, since)
    if result == IN_PROGRESS:
        raise not_in_time(library, "CommWindowRegister", timeout, since)
    if not window:
        raise UnsupportedError(
            f"{library.vendor.title} made no window of this memory: these GPUs cannot reach each other's",
            hint="symmetric memory needs NVLink or PCIe peers, or a network that NCCL's one-sided operations "
            "support; use collectives, or send and recv",
        )
    return int(window)


class Windows(OneSided):
    """The library's one-sided operations, for one communicator."""

    def __init__(self, backend: Any, registrations: Registrations, indices: int) -> None:
        self._backend = backend  # for its communicator, its stream, and its errors
        self._registrations = registrations
        self.indices = indices
        self.used = set()

    def range_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        return self._registrations.range_of(tensor, True)

    def open(self, at: int, nbytes: int, timeout: float) -> int:
        backend = self._backend
        with backend.on_device(backend._device):
            return open_window(backend._library, backend._alive(), at, nbytes, SYMMETRIC, timeout)

    def close(self, window: int) -> None:
        backend = self._backend
        with backend.on_device(backend._device):
            result = backend._native.window_deregister(backend._alive(), window)
            backend._library.check("CommWindowDeregister", result, backend._comm)

    def put(self, window: int, tensor: torch.Tensor, peer: int, offset: int, index: int) -> None:
        place = tensor.data_ptr(), tensor.nbytes, types.BYTE, peer, window, offset
        self._issue("PutSignal", self._backend._native.put_signal, *place, index, 0, 0)

    def signal(self, peer: int, index: int) -> None:
        self._issue("Signal", self._backend._native.signal, peer, index, 0, 0)

    def wait(self, peer: int, index: int, count: int) -> None:
        self._issue("WaitSignal", self._backend._native.wait_signal, count, peer, index)

    def _issue(self, what: str, function: Callable[..., int], *arguments: int) -> None:
        backend = self._backend
        with backend.on_device(backend._device):
            try:
                backend._do(what, function(*arguments, backend._alive(), backend._stream()))
            except BackendError as error:
                if not re.search("RMA|one-sided", error.message):
                    raise
                raise UnsupportedError(
                    f"the library has no one-sided operations on these GPUs: {error.message}",
                    hint="they need NVLink or PCIe peers, or a network plugin for them; use send and recv",
                ) from None
