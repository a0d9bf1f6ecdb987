"""Protocols: the executor, and the engine and the symmetric memory as the parts below them see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from unicomm.comms.backend import Backend
from unicomm.comms.errors import CommError
from unicomm.comms.streams import Streams
from unicomm.comms.work import Work

from .completion import Group
from .hooks import Hooks
from .member import Member

if TYPE_CHECKING:
    from .issued import IssuedOperation


class SymmetricHeap(Protocol):
    """The symmetric memory of a communicator, as far as execution has to know it."""

    def grace(self) -> float:
        """Seconds that an operation gets beyond its timeout, for a wait of its kernels to report its own."""
        ...

    def late_error(self) -> CommError | None:
        """The error that ended a wait of its kernels, or None. Must not block."""
        ...

    def abort(self) -> None:
        """Ends the waits of its kernels on this rank."""
        ...

    def close(self) -> None:
        """Frees the heap. Called by finalize, when no operation runs."""
        ...


class Executor(Protocol):
    """Runs the issued operations of one communicator, in the order in which they are handed to it."""

    @property
    def streams(self) -> Streams | None:
        """Of the device that the operations run on; None for operations that block the host."""
        ...

    @property
    def thread(self) -> int:
        """The identifier of the thread that runs pending operations; 0 while there is none."""
        ...

    @property
    def unattended(self) -> bool:
        """Whether messages are queued that no thread runs or is about to run."""
        ...

    def run(self, op: IssuedOperation) -> Work:
        """Begins the operation's records, then runs it or has it run. Called in the order of the operations.

        A synchronous operation that runs in this call raises its error here.
        """
        ...

    def settle(self, op: IssuedOperation, work: Work) -> None:
        """Blocks until a synchronous operation has completed. Called after the order has been released."""
        ...

    def seal(self) -> None:
        """Makes the queued messages, if there are any, run before what is issued next."""
        ...

    def run_after_pending(self, job: Callable[[], None]) -> None:
        """Runs `job` behind all operations that were issued before: now, if none is pending."""
        ...

    def check_can_wait(self, op: str) -> None:
        """Raises `NotReadyError` in a callback whose thread would have to run what it waits for."""
        ...

    def broke(self, error: CommError) -> None:
        """The communicator is broken by `error`."""
        ...

    def last(self) -> Work | None:
        """The operation that completes after all others that were issued to a stream; None on the host."""
        ...

    def follow_last(self) -> None:
        """Orders later work of the current stream behind the last operation. Does nothing on the host."""
        ...

    @property
    def busy(self) -> bool:
        """Whether an operation is pending."""
        ...

    def pending(self) -> Sequence[Work]:
        """The operations that are pending, oldest first."""
        ...

    def is_current(self) -> bool:
        """Whether the caller's thread is the one that runs pending operations."""
        ...

    def drain(self, timeout: float) -> bool:
        """Waits until nothing is pending; False when `timeout` seconds pass first."""
        ...

    def catch_up(self) -> None:
        """Takes note of the operations that a device has completed by now."""
        ...

    def close(self, timeout: float) -> bool:
        """Ends the executor's threads once idle; False when they do not end within `timeout` seconds."""
        ...

    def forget(self) -> None:
        """Gives up everything that is pending, in a forked child. Takes no lock."""
        ...


class Owner(Protocol):
    """The engine of a communicator, as its executors, message queue and profiler see it."""

    name: str
    rank: int
    member: Member
    backend: Backend
    group: Group
    hooks: Hooks
    fast: Any
    executor: Executor
    broken: CommError | None
    finalized: bool
    symmetric: SymmetricHeap | None

    def in_order(self) -> AbstractContextManager[None]:
        """Holds the order of the communicator's operations."""
        ...

    def check_open(self, op: str) -> None:
        """Raises when the communicator is finalized, broken or without ranks."""
        ...

    def check_broken(self) -> None:
        """Raises when the communicator is broken."""
        ...

    def failed(self, op: IssuedOperation, error: BaseException) -> None:
        """Completes the error of an operation, records it, and breaks the communicator if it has to."""
        ...
