"""Registry of the communicators of this process that are not finalized.

The end of the process closes them, a fork makes them unusable in the child, and the search for deadlocks asks
whether their background threads may still act (thread_quiescence.py).
"""

from __future__ import annotations

from typing import Protocol

from unicomm.comms.backend import Backend


class OpenExecutor(Protocol):
    """What the search for deadlocks asks of an executor."""

    @property
    def thread(self) -> int:
        """The thread that runs operations in the background, as `threading.get_ident` numbers it; 0: none."""

    @property
    def busy(self) -> bool:
        """Whether operations are pending."""

    @property
    def unattended(self) -> bool:
        """Whether messages are to be started that no thread has taken yet."""


class OpenEngine(Protocol):
    """What the search for deadlocks asks of a communicator's engine."""

    backend: Backend

    @property
    def executor(self) -> OpenExecutor: ...


class OpenCommunicator(Protocol):
    """What a registered communicator offers."""

    @property
    def _engine(self) -> OpenEngine: ...

    def abort(self) -> None: ...


# Strong references: a communicator that is dropped while operations are pending must not lose them, and the
# other ranks must not see this rank as gone.
_open: set[OpenCommunicator] = set()


def add(comm: OpenCommunicator) -> None:
    _open.add(comm)


def discard(comm: object) -> None:
    _open.discard(comm)


def every() -> list[OpenCommunicator]:
    return list(_open)


def abort_all() -> None:
    """Aborts all communicators of this process, so that none of their operations waits any longer."""
    for comm in every():
        comm.abort()
