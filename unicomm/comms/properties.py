"""What a communicator says of itself: its rank and size, names, device, backend and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unicomm.c10d.compat import OpaqueBase, methods, not_traced
from unicomm.comms.memory.allocator import MemAllocator

from .backend import Capabilities, ReportsMemory
from .options import CommOptions

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.execution.member import Member
    from unicomm.comms.membership.epoch import ReconfigureState

# Methods whose result never changes, so that torch.compile may call them while it traces.
CONSTANT = ("get_rank", "get_size", "get_name", "get_ranks")


class CommunicatorProperties(OpaqueBase):  # type: ignore[misc]
    """The properties of a `Communicator`. None of them sends anything or needs the other ranks."""

    _member: Member
    _engine: Engine
    _dynamic: ReconfigureState | None

    @property
    def rank(self) -> int:
        """This rank, from 0 to `size - 1`: short for `get_rank()`."""
        return self._member.rank

    @property
    def size(self) -> int:
        """The number of ranks: short for `get_size()`."""
        return self._member.size

    def get_rank(self) -> int:
        """This rank, from 0 to `get_size() - 1`."""
        return self._member.rank

    def get_size(self) -> int:
        """The number of ranks."""
        return self._member.size

    def get_ranks(self) -> list[int]:
        """The numbers of the ranks in the whole job, in this communicator's order."""
        return list(self._member.labels)

    def get_name(self) -> str:
        """The name that it was created with."""
        return self._member.name

    def get_uid(self) -> str:
        """An identifier, the same on all ranks of this communicator and different for each communicator."""
        return self._member.uid

    def get_options(self) -> CommOptions:
        """The options that it was created with, and the timeout that was set since."""
        return self._member.options

    def get_device(self) -> torch.device:
        """The device that its tensors are on."""
        return self._member.device

    def get_backend(self) -> str:
        """The backend's name, such as "shm"."""
        return self._member.backend.name

    def get_backend_version(self) -> str:
        """The version of the library that moves the data, such as "UCX 1.22.0"; "" if it has none."""
        return type(self._member.backend).version()

    def get_capabilities(self) -> Capabilities:
        """What the backend can do, as data."""
        return self._member.backend.capabilities

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds for the communicator, by purpose."""
        backend = self._member.backend
        return backend.memory() if isinstance(backend, ReportsMemory) else {}

    @property
    def mem_allocator(self) -> MemAllocator:
        """Makes tensors that this communicator's collectives use without staging copies.

        Raises `UnsupportedError` if the backend has no such memory, and `NotReadyError` after `finalize`.
        """
        return MemAllocator(self._engine)

    @property
    def unsafe_backend(self) -> object:
        """The backend's own object, for what unicomm does not offer. unicomm promises nothing for its use."""
        return self._member.backend

    @property
    def _recorder_index(self) -> int:
        return self._member.recorder_index

    @property
    def _recorder_indexes(self) -> set[int]:
        """The recorder's indexes of this communicator: one for each connection that it has had."""
        before = set() if self._dynamic is None else self._dynamic.recorded
        return {self._member.recorder_index, *before}

    def __repr__(self) -> str:
        state = "finalized" if self._engine.finalized else "broken" if self._engine.broken else "open"
        return (
            f"<Communicator '{self.get_name()}' {self.get_backend()} rank {self.get_rank()}/{self.get_size()}"
            f" on {self._member.device}, {state}>"
        )


not_traced(methods(CommunicatorProperties, CONSTANT))
