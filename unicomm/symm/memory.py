"""Making, finding and freeing symmetric memory.

`comm` is the communicator that has the memory; `timeout` is in seconds, by default the communicator's; `size`
and `dtype` are those of `torch.empty`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.memory.initialize import initialize, initialize_team
from unicomm.comms.memory.symmetric import memory_of
from unicomm.comms.memory.window import Window
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.numbers import ADDRESSABLE, tensor_shape, whole_number
from unicomm.comms.operations.symmetric_table import Capability

Timeout = timedelta | float | None


def init(comm: Communicator, heap_bytes: int = 0, timeout: Timeout = None) -> None:
    """Connects the communicator's symmetric memory. Collective; again it does nothing.

    Nothing else does so in secret: without it, `empty` raises `NotReadyError`. The memory is there until
    `comm.finalize()`, and pages are used as they are touched.

    Args:
        heap_bytes: room for each rank's allocations; rank 0's number counts. 0: as much as the machine has.

    Raises `UnsupportedError` where the backend has no symmetric memory, `CommTimeoutError` with the ranks
    that did not come.
    """
    initialize(comm._engine, heap_bytes, timeout)


def init_team(team: Communicator | None, whole: Communicator, timeout: Timeout = None) -> None:
    """Lets a communicator of some of `whole`'s ranks use the symmetric memory of `whole`.

    Collective over `whole`: ranks that are in no team pass None, the others a communicator that
    `whole.split` made, which has to have evenly spaced ranks. Teams may be made as often as wanted, also of
    the same ranks.

    Tensors from `empty(..., comm=whole)` can then be passed to operations with `comm=team`, for which the
    team's ranks alone have to come. A team has no allocations and no windows of its own.

    Raises `InvalidArgumentError` on the ranks of a team that cannot be, `MismatchError` on the others, and
    `UnsupportedError` where the library has no teams.
    """
    initialize_team(None if team is None else team._engine, whole._engine, timeout)


def synchronize(comm: Communicator, timeout: Timeout = None) -> None:
    """Waits on the host for what the current stream has, and raises what was refused on the device.

    On a device, operations are in the order of their stream and nobody waits. So the errors that all ranks
    find together, splits beyond their input, an output that is too small, ranks that disagree, are raised
    here, at `empty` and `free`, and by the operations that return numbers: `InvalidArgumentError`,
    `MismatchError`; nothing was written. All ranks have to call it at the same place. On the CPU each
    operation has raised its own, and this does nothing.
    """
    memory_of(comm._engine, "symm_barrier").synchronize(timeout)


def capabilities(comm: Communicator) -> Capability:
    """What the library behind the communicator's symmetric memory can do."""
    return memory_of(comm._engine, "symm_init").capabilities


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    comm: Communicator,
    timeout: Timeout = None,
) -> torch.Tensor:
    """A contiguous tensor with undefined values that all ranks of `comm` have at the same offset.

    Collective: all ranks call it in the same order with the same number of bytes, else `MismatchError` on
    all of them. It lives until `free`, not only as long as the tensor. `InvalidArgumentError` on all ranks
    where the heap has no room.
    """
    memory = memory_of(comm._engine, "symm_allocate")
    with comm._engine.located("symm_allocate"):
        shape, dtype, nbytes = tensor_shape(size, dtype, least=1)
    return memory.allocate(nbytes, timeout).view(dtype).view(shape)


def free(tensor: Array, comm: Communicator, timeout: Timeout = None) -> None:
    """Gives back what `empty` returned. Collective, and never done by a destructor.

    Neither the tensor nor a view of it may be used afterwards, nor may other ranks' tensors from
    `map_remote_tensor` and `get_buffer`: writes to them raise `RuntimeError`, and operations with them
    `InvalidArgumentError`. Windows and handles on the tensor lose it: what they would do to it raises
    `NotReadyError`, until `tensor_register` gives the window another one.
    """
    memory_of(comm._engine, "symm_free").free(tensor, timeout)


class Handle:
    """What `rendezvous` returns: the same tensor on all ranks.

    `rank` and `world_size` are the communicator's, `buffer_size` is in bytes, `window` offers atomics and
    bounds-checked puts.
    """

    def __init__(self, window: Window, comm: Communicator, buffer_size: int) -> None:
        self.window = window
        self.rank, self.world_size = comm.get_rank(), comm.get_size()
        self.buffer_size = buffer_size

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A view of `rank`'s tensor with shape `sizes`; `storage_offset` is in elements of `dtype`.

        Raises `InvalidArgumentError` where it does not fit in the tensor.
        """
        shape, dtype, nbytes = tensor_shape(tuple(sizes), dtype)
        first = whole_number("storage_offset", storage_offset, 0, ADDRESSABLE) * dtype.itemsize
        last = first + nbytes
        if last > self.buffer_size:
            raise InvalidArgumentError(
                f"bytes {first} to {last} of a buffer of {self.buffer_size}",
                hint="ask for fewer elements, or make a larger tensor",
            )
        whole = self.window.map_remote_tensor(rank).view(-1).view(torch.uint8)
        return whole[first:last].view(dtype).view(shape)

    def barrier(self, timeout: Timeout = None) -> None:
        """Returns when all ranks have called it."""
        self.window.barrier(timeout=timeout)

    def put_signal(self, dst: int, timeout: Timeout = None) -> None:
        """Signals rank `dst`; signals count and are never lost."""
        self.window.signal(dst, False, timeout=timeout)

    def wait_signal(self, src: int, timeout: Timeout = None) -> None:
        """Waits for the next signal of rank `src`."""
        self.window.wait_signal(src, False, timeout=timeout)

    def free(self, timeout: Timeout = None) -> None:
        """Gives the handle back. Collective; the tensor stays."""
        self.window.free(timeout)


def rendezvous(tensor: Array, comm: Communicator, timeout: Timeout = None) -> Handle:
    """Connects the ranks' copies of a symmetric tensor. Collective.

    Raises `InvalidArgumentError` for a tensor that is not symmetric, `MismatchError` on all ranks if they
    pass different ones.
    """
    window = comm.new_window(tensor, timeout=timeout)
    return Handle(window, comm, window.get_size())
