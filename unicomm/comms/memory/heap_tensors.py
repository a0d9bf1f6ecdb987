"""HeapTensors: the tensors that this process has on a symmetric heap, which end when their memory is freed.

The memory of an allocation belongs to another tensor soon after it was freed. Tensors that the program still
has on it, its own and those that show other ranks' copies, would then write into that tensor.
"""

from __future__ import annotations

import bisect
import weakref

import torch

from unicomm.c10d.compat import refuse_writes


class HeapTensors:
    """The storages on each allocation, as long as a tensor uses them.

    A tensor and all views of it share one storage, so ending the storage ends them all.
    """

    def __init__(self) -> None:
        self._own: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the address of the allocation
        self._mapped: dict[int, weakref.WeakSet[torch.UntypedStorage]] = {}
        self._addresses: list[int] = []  # of the allocations, sorted

    def allocated(self, address: int, tensor: torch.Tensor) -> None:
        """Notes a new allocation at `address` and the tensor on it."""
        bisect.insort(self._addresses, address)
        self._own[address] = weakref.ref(tensor.untyped_storage())

    def mapped(self, address: int, tensor: torch.Tensor) -> None:
        """Notes another rank's copy of the allocation that has this rank's `address`, as a tensor."""
        begin = self._addresses[bisect.bisect_right(self._addresses, address) - 1]
        self._mapped.setdefault(begin, weakref.WeakSet()).add(tensor.untyped_storage())

    def freed(self, address: int) -> None:
        """From now on the tensors on the allocation can neither be written to nor tell their address."""
        self._addresses.remove(address)
        if (own := self._own.pop(address)()) is not None:
            refuse_writes(own)
        for storage in self._mapped.pop(address, ()):
            refuse_writes(storage)
