"""Tensors in memory that a backend can use where it is, without a copy into its own.

On `shm`, that is memory which all ranks of the host can read. From 64 KiB on, a collective whose data lie
there on all ranks (at the root, where one rank sends) reads them where they are; anything else is staged as
always, so that it never matters for the result where a tensor lies. An operation returns when nobody reads
its tensors any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .errors import InvalidArgumentError

if TYPE_CHECKING:
    from .backend import Backend
    from .communicator import Communicator


class MemAllocator:
    """What `Communicator.mem_allocator` gives: makes tensors that the communicator's backend moves directly.

    The memory belongs to the process, not to the communicator: every communicator of the same backend in
    this process uses it as directly, also those that are made later, and it goes when the last tensor on it
    goes, also after `finalize`. A forked child shares its parent's tensors with it, and writes of the one are
    seen by the other.
    """

    def __init__(self, backend: Backend, name: str, device: torch.device) -> None:
        self._backend = backend
        self._comm = name
        self._device = device

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A contiguous tensor with undefined values, as `torch.empty`. Local: no other rank takes part.

        Raises `InvalidArgumentError` for a size or dtype that cannot be, and `BackendError` when there is not
        enough memory.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
        if any(n < 0 for n in shape):
            raise InvalidArgumentError(
                f"a tensor of size {tuple(shape)}", comm=self._comm, hint="sizes are 0 or more"
            )
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._backend.allocate(count * dtype.itemsize).view(dtype).view(shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the backend can use the tensor's memory where it is."""
        return self._backend.allocated_here(tensor)

    def allocated(self) -> int:
        """Bytes of this process's tensors that are alive."""
        return self._backend.bytes_allocated()

    def __repr__(self) -> str:
        return f"<MemAllocator of {self._backend.name}, {self.allocated()} bytes in use>"


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, comm: Communicator) -> torch.Tensor:
    """A tensor like `torch.empty(*size, dtype=dtype)` in memory that `comm` uses without staging copies.

    Short for `comm.mem_allocator.empty(...)`; see there. Local. `UnsupportedError` where the backend has no
    such memory.
    """
    return comm.mem_allocator.empty(*size, dtype=dtype)
