"""The errors of unicomm, one tree under `CommError`.

Every message says what happened, which ranks caused it and what to do about it. `InvalidArgumentError`,
`UnsupportedError` and `NotReadyError` are raised on the calling rank alone, before anything is recorded or
sent, and leave the communicator usable. `MismatchError` is raised on every rank before any tensor is written,
and also leaves the communicator usable, as does `SilentCorruptionError`, which comes when the tensors are
written. After a `CommTimeoutError`, `DeadlockError`, `PeerLostError`,
`AbortedError` or `BackendError` the communicator is broken: its later operations raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CommError(RuntimeError):
    """Base class of all errors that a communicator raises.

    Attributes:
        op: name of the operation, or None when the error concerns no operation.
        comm: name of the communicator, or None.
        seq: sequence number of the operation, or None when the operation was never issued.
        rank: this rank within the communicator, or None.
        culprits: ranks of the communicator that caused the error; empty when they are unknown.
        dead: culprits whose process has ended or that have finalized the communicator.
        absent: culprits that are alive and not in an operation of this communicator.
        late: culprits that are in an earlier operation of this communicator.
        hint: what to do about the error.
    """

    #: The `failures.faults.Fault` that this error was made from, if there is one. Stays in this process.
    fault: Any = None

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        comm: str | None = None,
        seq: int | None = None,
        rank: int | None = None,
        culprits: Sequence[int] = (),
        dead: Sequence[int] = (),
        absent: Sequence[int] = (),
        late: Sequence[int] = (),
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.comm = comm
        self.seq = seq
        self.rank = rank
        self.culprits = tuple(culprits)
        self.hint = hint
        self.sort_culprits(dead, absent, late)

    def sort_culprits(self, dead: Sequence[int], absent: Sequence[int], late: Sequence[int]) -> None:
        """Sets `dead`, `absent` and `late`; if they name any rank, `culprits` becomes their union."""
        self.dead, self.absent, self.late = tuple(dead), tuple(absent), tuple(late)
        if known := {*dead, *absent, *late}:
            self.culprits = tuple(sorted(known))

    def locate(self, op: str | None, comm: str, rank: int, seq: int | None = None) -> None:
        """Says where the error happened, as far as it does not say so already."""
        self.op = self.op or op
        self.comm = self.comm or comm
        self.rank = rank if self.rank is None else self.rank
        self.seq = seq if self.seq is None else self.seq

    def again(self, message: str) -> CommError:
        """Returns a new error with the same class and fields and another message."""
        return type(self)(message, **self._fields())

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __str__(self) -> str:
        where = []
        if self.op is not None:
            where.append(self.op if self.seq is None else f"{self.op} #{self.seq}")
        if self.comm is not None:
            where.append(f"communicator '{self.comm}'")
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        text = f"[{', '.join(where)}] {self.message}" if where else self.message
        return f"{text}\n  -> {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel between processes (multiprocessing, torchelastic) by pickle.
        return (_rebuild, (type(self), self.message, self._fields()))


_FIELDS = ("op", "comm", "seq", "rank", "culprits", "dead", "absent", "late", "hint")


def _rebuild(cls: type[CommError], message: str, fields: dict[str, Any]) -> CommError:
    return cls(message, **fields)


class InvalidArgumentError(CommError, ValueError):
    """An argument is wrong. Raised on this rank, before anything is recorded or sent."""


class UnsupportedError(CommError):
    """The backend, data type or library version does not support the call. Raised before any side effect."""


class NotReadyError(CommError):
    """The communicator is finalized or has no ranks yet, or the requested result is not available yet."""

    #: Of a call in the midst of an operation of the same thread, in a callback or a signal handler. If a
    #: handler lets it out, the operation ends half way, and the communicator is broken.
    amid = False


class MismatchError(CommError):
    """The ranks did not call the same operation with matching arguments; `culprits` are the minority."""


class SilentCorruptionError(CommError):
    """The results of the ranks differ although they must have the same bits; `culprits` are the minority.

    Raised on every rank by operations that run with the hint `checksum`. Without a majority, as with two
    ranks, `culprits` are all ranks whose result may be the wrong one. The result must not be used.
    """


class CommTimeoutError(CommError):
    """The deadline passed; `culprits` are the ranks that were awaited."""

    #: Whether the message already says where the awaited ranks are.
    explained = False


class DeadlockError(CommTimeoutError):
    """Ranks wait for each other and the awaited ranks can no longer arrive; `culprits` are these ranks.

    A `CommTimeoutError` that is raised before the deadline, because waiting longer cannot help.
    """


class PeerLostError(CommError):
    """The process of a rank has ended, or the rank has left the communicator; `culprits` names the rank."""


class AbortedError(CommError):
    """The communicator was aborted, by this rank or by another one; `culprits` names the rank."""


class BackendError(CommError):
    """The underlying library failed; the message contains the library's own message."""
