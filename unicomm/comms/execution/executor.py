"""What an executor is, which runs a communicator's operations; and symmetric memory as execution sees it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from unicomm.comms.errors import CommError
from unicomm.comms.streams import Streams
from unicomm.comms.work import Work

from .issued import IssuedOperation


class SymmetricHeap(Protocol):
    """The symmetric memory of a communicator, as far as execution has to know it."""

    def grace(self) -> float:
        """Seconds that an operation gets beyond its timeout, for a wait of its kernels to report its own."""

    def late_error(self) -> CommError | None:
        """The error that ended a wait of its kernels, or None. Must not block."""

    def abort(self, error: CommError | None = None) -> None:
        """Ends the waits of its kernels on this rank."""

    def close(self) -> None:
        """Frees the heap. Called by finalize, when no operation runs."""


class Executor(abc.ABC):
    """Runs the issued operations of one communicator, in the order in which they are handed to it.

    A method that only one kind of executor needs does nothing here.

    Attributes:
        streams: of the device that the operations run on; None for operations that block the host.
        thread: the identifier of the thread that runs pending operations; 0 while there is none.
    """

    streams: Streams | None = None
    thread: int = 0

    @property
    def unattended(self) -> bool:
        """Whether messages are queued that no thread runs or is about to run."""
        return False

    @abc.abstractmethod
    def run(self, op: IssuedOperation) -> Work:
        """Begins the operation's records, then runs it or has it run. Called in the order of the operations.

        A synchronous operation that runs in this call raises its error here.
        """

    @abc.abstractmethod
    def settle(self, op: IssuedOperation, work: Work) -> None:
        """Blocks until a synchronous operation has completed; raises its error. Called after the order has
        been released."""

    @abc.abstractmethod
    def run_after_pending(self, job: Callable[[], None]) -> None:
        """Runs `job` behind all operations that were issued before: now, if none is pending."""

    def seal(self) -> None:  # noqa: B027
        """Makes the queued messages, if there are any, run before what is issued next."""

    def check_can_issue(self, op: IssuedOperation) -> None:
        """Raises `NotReadyError` where `op` would wait for what the caller's thread has to run first."""
        if not op.async_op:
            self.check_can_wait(op.name)

    def check_can_wait(self, op: str) -> None:  # noqa: B027
        """Raises `NotReadyError` in a callback or signal handler whose thread has to run something first."""

    def check_can_close(self) -> None:  # noqa: B027
        """Raises `NotReadyError` in the midst of an operation that this very thread runs."""

    @property
    def running(self) -> IssuedOperation | None:
        """The operation that a thread runs at this moment, if the executor knows it."""
        return None

    def broke(self, error: CommError) -> None:  # noqa: B027
        """The communicator is broken by `error`."""

    def last(self) -> Work | None:
        """The operation that completes after all others that were issued to a stream; None on the host."""
        return None

    def follow_last(self) -> None:  # noqa: B027
        """Orders later work of the current stream behind the last operation. Does nothing on the host."""

    @property
    @abc.abstractmethod
    def busy(self) -> bool:
        """Whether an operation is pending."""

    @abc.abstractmethod
    def pending(self) -> Sequence[Work]:
        """The operations that are pending, oldest first."""

    def is_current(self) -> bool:
        """Whether the caller's thread is the one that runs pending operations."""
        return False

    @abc.abstractmethod
    def drain(self, timeout: float) -> bool:
        """Waits until nothing is pending; False when `timeout` seconds pass first."""

    def catch_up(self) -> None:  # noqa: B027
        """Takes note of the operations that a device has completed by now."""

    def close(self, timeout: float) -> bool:
        """Ends the executor's threads once idle; False when they do not end within `timeout` seconds."""
        return True

    @abc.abstractmethod
    def forget(self) -> None:
        """Gives up everything that is pending, in a forked child. Takes no lock."""


class MakesExecutor(abc.ABC):
    """A backend whose operations run in an executor of its own."""

    @abc.abstractmethod
    def executor(self, engine: Any) -> Executor:
        """Returns the executor of a new communicator; called once, with its `Engine`."""
