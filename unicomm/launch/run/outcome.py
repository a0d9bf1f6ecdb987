"""How a job ended on this host, and the exit code that says so. docs/run.md has the table."""

from __future__ import annotations

import enum
import errno
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from unicomm.flight_recorder.ring.endings import signal_name

from .job import Attempt
from .stop_signals import Received

UNUSABLE = 2  # the options contradict each other
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells say it


class Ended(str, enum.Enum):
    """The closed list of ends. The verdict file has the values; they never change."""

    SUCCEEDED = "succeeded"
    RANK_FAILED = "rank-failed"
    STOPPED = "stopped"
    NOT_STARTED = "not-started"
    LAUNCHER_FAILED = "launcher-failed"


@dataclass(frozen=True)
class Outcome:
    """How a job ended on this host; `why` is a sentence, "" for success."""

    ended: Ended
    exit_code: int
    why: str = ""


def outcome(
    error: BaseException | None, attempt: Attempt, stop: Received | None, culprits: Sequence[int] = ()
) -> Outcome:
    """Returns how a job ended.

    Args:
        error: what torchrun raised; None if it returned.
        attempt: the last start of the ranks.
        stop: the first stop signal.
        culprits: the ranks that the flight recorder blames.
    """
    if error is None:
        return Outcome(Ended.SUCCEEDED, 0)
    if attempt.ended and (stop is None or attempt.failed_at <= stop.monotonic):
        rank = _first(attempt.ended, culprits)
        return Outcome(
            Ended.RANK_FAILED, exit_code(attempt.ended[rank]), f"rank {rank} {end_text(attempt.ended[rank])}"
        )
    if stop is not None:
        return stopped_outcome(stop.signal)
    if (unstartable := attempt.unstartable) is not None:
        missing = unstartable.errno == errno.ENOENT
        why = f"cannot start {unstartable.filename}: {unstartable.strerror}"
        return Outcome(Ended.NOT_STARTED, _NOT_FOUND if missing else _NOT_EXECUTABLE, why)
    if attempt.number < 0 and isinstance(error, (ValueError, AssertionError)):  # torchrun's own checks
        return Outcome(Ended.NOT_STARTED, UNUSABLE, str(error))
    return Outcome(Ended.LAUNCHER_FAILED, 1, f"{type(error).__name__}: {error}".partition("\n")[0])


def stopped_outcome(number: signal.Signals) -> Outcome:
    """Returns the outcome of a job whose launcher was told to stop."""
    return Outcome(Ended.STOPPED, 128 + number, f"the launcher was stopped by {number.name}")


def _first(ended: dict[int, int], culprits: Sequence[int]) -> int:
    """The rank that counts: the culprit; else one that a signal ended, after which the others raise."""
    blamed = [rank for rank in sorted(culprits) if rank in ended]
    return blamed[0] if blamed else min(ended, key=lambda rank: (ended[rank] > 0, rank))


def exit_code(code: int) -> int:
    """A process's exit code as shells say it: 128 + n for signal n, which is `-n` here."""
    return 128 - code if code < 0 else code


def end_text(code: int) -> str:
    """How a process ended, after its name in a sentence."""
    return f"was ended by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"
