"""The errors of unicomm: one small tree.

Every message says what happened, who caused it and what to do. `InvalidArgumentError`,
`UnsupportedError` and `NotReadyError` are raised before anything is recorded or sent, on the calling
rank alone, and leave the communicator usable. `MismatchError` is raised on every rank before any
tensor is written and leaves the communicator usable as well. After `CommTimeoutError`, `PeerLostError`,
`AbortedError` and `BackendError` the communicator is broken: its later operations raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CommError(RuntimeError):
    """Base of all errors that a communicator raises.

    Attributes:
        op: name of the operation, or None when the error is not about one.
        comm: name of the communicator, or None.
        seq: sequence number of the operation, or None when it was never issued.
        rank: this rank within the communicator, or None.
        culprits: ranks of the communicator that caused the error; empty when unknown.
        dead, absent, late: the culprits by what is known of them, for a rank that did not come: its process
            is gone or it has finalized; it is alive, and elsewhere; it was on its way, in an earlier
            operation of this communicator. All empty when nothing is known.
        hint: what to do about it.
    """

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
        """Says what is known of the culprits; `culprits` becomes the union if there are any."""
        self.dead, self.absent, self.late = tuple(dead), tuple(absent), tuple(late)
        if known := {*dead, *absent, *late}:
            self.culprits = tuple(sorted(known))

    def again(self, message: str) -> CommError:
        """The same error with another message."""
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
    """An argument is wrong. Raised on this rank, before anything was recorded or sent."""


class UnsupportedError(CommError):
    """This backend, data type or library version cannot do that. Raised before any side effect."""


class NotReadyError(CommError):
    """The communicator is finalized, or the result that was asked for is not there yet."""


class MismatchError(CommError):
    """The ranks did not call the same operation with matching arguments; `culprits` are the minority."""


class CommTimeoutError(CommError):
    """The deadline passed, or never will anybody come; `culprits` are the ranks that were awaited."""

    explained = False  # the message says already where the ranks are


class PeerLostError(CommError):
    """A rank's process is gone, or that rank left the communicator; `culprits` names it."""


class AbortedError(CommError):
    """The communicator was aborted, here or by another rank."""


class BackendError(CommError):
    """The library underneath failed; the message carries its own words."""
