"""The failures of live ranks, and the error that reports them."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unicomm.flight_recorder.texts import format_ranks


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank's call.

    Attributes:
        rank: the rank that failed.
        kind: "raised": its function raised; "ended": its process ended; "timeout": it was not done in time;
            "interrupted": other ranks had failed and it did not end by itself.
        summary: the failure in one line.
        traceback: the rank's traceback; for an interrupted rank, its stack then. May be empty.
        exception: the exception that it raised, None if there is none or it could not be sent.
    """

    rank: int
    kind: Literal["raised", "ended", "timeout", "interrupted"]
    summary: str
    traceback: str = ""
    exception: BaseException | None = None


class RankError(RuntimeError):
    """Some ranks failed. The message names all of them and contains their tracebacks.

    Attributes:
        failures: the failures by rank; those that were not caused by others come first.
        results: the results of the other ranks, by rank.
    """

    def __init__(self, failures: Mapping[int, RankFailure], results: Mapping[int, Any]) -> None:
        order = {"ended": 0, "raised": 1, "timeout": 1, "interrupted": 2}
        self.failures = dict(sorted(failures.items(), key=lambda item: order[item[1].kind]))
        self.results = dict(results)
        super().__init__(_explain(self.failures, len(failures) + len(results)))


def _explain(failures: Mapping[int, RankFailure], total: int) -> str:
    same: dict[tuple[str, str], list[int]] = {}
    for failure in failures.values():
        same.setdefault((failure.summary, failure.traceback), []).append(failure.rank)
    parts = [f"{names(failures)} of {total} failed" if total > 1 else f"{names(failures)} failed"]
    parts += [f"{names(ranks)}: {summary}" for (summary, _), ranks in same.items()]
    for (_, trace), ranks in same.items():
        if trace:
            parts.append(f"\n--- {names(ranks)} ---\n{trace.rstrip()}")
    return "\n".join(parts)


def names(ranks: Iterable[int]) -> str:
    """Formats ranks, as "rank 3" or "ranks 0-2, 5"."""
    chosen = sorted(ranks)
    return f"rank{'s' if len(chosen) > 1 else ''} {format_ranks(chosen).replace(',', ', ')}"


def end_of(code: int) -> str:
    """Describes the end of a process by its exit code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"
