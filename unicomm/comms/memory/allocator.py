"""MemAllocator: tensors in memory that a backend uses without staging copies; registration of other memory.

On `shm`, all ranks of the host can read that memory. From 64 KiB on, a collective whose data lie there on all
ranks (only at the root, if one rank sends) reads them in place; other data are staged. The result never
depends on where a tensor lies. An operation returns when no rank reads its tensors any more.

On `nccl` and `rccl` it is the library's own memory, which other GPUs can map. The library decides by itself
how it uses a tensor, and gains most from memory that was registered before: `tensor_register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.backend import AllocatesMemory, Backend, RegistersMemory
from unicomm.comms.execution.one_sided import agree, issue
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.numbers import tensor_shape
from unicomm.comms.operations.table import OPERATIONS

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine, Holder
    from unicomm.comms.options import Timeout


class MemAllocator:
    """Makes tensors that a communicator's backend moves directly; returned by `Communicator.mem_allocator`.

    The memory belongs to the process, not to the communicator: every communicator of the same backend in this
    process uses it directly, including later ones, and it is freed with the last tensor on it, even after
    `finalize`. A forked child shares its parent's tensors: each sees what the other writes, and what the
    parent frees the child has lost. Give children clones.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.finalized and not engine.inherited:
            engine.check_open("mem_allocator")
        backend = engine.backend
        if not isinstance(backend, AllocatesMemory):
            engine.refuse("mem_allocator", f"backend '{backend.name}' has no memory of its own")
        with engine.located("mem_allocator"):
            backend.check_allocates()
        self._engine = engine
        self._memory: AllocatesMemory = backend
        self._backend: Backend = engine.backend

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A contiguous tensor with undefined values, as `torch.empty`. Local: no other rank takes part.

        Raises `InvalidArgumentError` for an impossible size or dtype, and `BackendError` if memory is
        short.
        """
        with self._engine.located("mem_allocator"):
            shape, dtype, nbytes = tensor_shape(size, dtype, most=1 << 63)
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype, device=self._engine.member.device)
        return self._memory.allocate(nbytes).view(dtype).view(shape)

    @property
    def pool(self) -> Any:
        """A `torch.cuda.MemPool` of this memory: `with torch.cuda.use_mem_pool(comm.mem_allocator.pool):`
        puts all tensors of the block there. Raises `UnsupportedError` if the memory is not a GPU's.
        """
        pool = self._memory.memory_pool()
        if pool is None:
            self._engine.refuse(
                "mem_allocator", f"backend '{self._backend.name}' has no pool for torch", "use empty(...)"
            )
        return pool

    def tensor_register(self, tensor: Array, symmetric: bool = False, timeout: Timeout = None) -> None:
        """Registers a tensor's memory with the communicator's library, so that operations use it directly.

        On a backend without registration (shm) this accepts tensors for which `holds` is true. The tensor is
        kept alive until it is deregistered or the communicator ends.

        Args:
            symmetric: the call is collective, with tensors of one size at the same place in blocks of one
                size, which they have if all ranks make the same tensors in the same order. Needs NCCL 2.27.
            timeout: seconds, by default the communicator's.

        Raises `UnsupportedError` if the library cannot register memory, `MismatchError` on all ranks if
        symmetric tensors differ, `InvalidArgumentError` for a tensor that is registered or cannot be.
        """
        engine, (tensor, backend) = self._engine, self._check(tensor)
        if backend is None:
            return
        with engine.located("tensor_register"):
            at, nbytes = backend.registered_range(tensor, symmetric)
        if symmetric:
            agree(engine, "tensor_register", [nbytes, tensor.data_ptr() - at, tensor.nbytes], [], timeout)

        def job(limit: float) -> None:
            backend.register(tensor, symmetric, limit)

        issue(engine, "tensor_register", job, inputs=[tensor], timeout=timeout)

    def tensor_deregister(self, tensor: Array, timeout: Timeout = None) -> None:
        """Undoes `tensor_register`, after this rank's pending operations, within `timeout` seconds."""
        engine, (tensor, backend) = self._engine, self._check(tensor)
        if backend is None:
            return
        limit = engine.per_op("tensor_register", None, timeout)
        before = issue(engine, "tensor_register", lambda _: None, timeout=timeout)
        before.wait_blocking(limit)
        with engine.located("tensor_register"), engine.in_order():
            backend.deregister(tensor)

    def _check(self, array: Array) -> tuple[torch.Tensor, RegistersMemory | None]:
        """Returns the tensor, and what registers it: None if it lies in memory that needs no registration."""
        engine, backend = self._engine, self._backend
        engine.check_open("tensor_register")
        engine.refuse_capture("tensor_register")
        tensor = engine.check.check_tensor(OPERATIONS["tensor_register"], "tensor", array)
        if isinstance(backend, RegistersMemory):
            return tensor, backend
        if not self.holds(tensor):
            engine.refuse(
                "tensor_register",
                f"backend '{backend.name}' registers no memory that is not its own",
                "make the tensor with comm.mem_allocator.empty(...)",
            )
        return tensor, None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory that the backend uses directly."""
        return self._memory.allocated_here(tensor)

    def allocated(self) -> int:
        """Bytes of this process's living tensors in such memory."""
        return self._memory.bytes_allocated()

    def __repr__(self) -> str:
        return f"<MemAllocator of {self._backend.name}, {self.allocated()} bytes in use>"


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, comm: Holder) -> torch.Tensor:
    """A tensor like `torch.empty(*size, dtype=dtype)` in memory that `comm` uses without staging copies.

    Short for `comm.mem_allocator.empty(...)`. Local. Raises `UnsupportedError` if the backend has no such
    memory.
    """
    return MemAllocator(comm._engine).empty(*size, dtype=dtype)
