"""How ranks fail, and what is said about it."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unicomm.flight_recorder.ring.ranks import format_ranks


@dataclass(frozen=True)
class RankFailure:
    """How one rank's call failed.

    Attributes:
        rank: which.
        kind: "raised" an exception, "ended" as a process, not done at the "timeout", or "interrupted",
            because other ranks had failed and this one did not end by itself.
        summary: one line.
        traceback: of the rank; where it was, when it was interrupted. May be empty.
        exception: what it raised, when that could be sent, else None.
    """

    rank: int
    kind: Literal["raised", "ended", "timeout", "interrupted"]
    summary: str
    traceback: str = ""
    exception: BaseException | None = None


class RankError(RuntimeError):
    """Some ranks failed. The message names all of them and has their tracebacks.

    Attributes:
        failures: by rank; those who failed by themselves first, in the order in which it was noticed.
        results: what the other ranks returned, by rank.
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
    """Ranks in words."""
    chosen = sorted(ranks)
    return f"rank{'s' if len(chosen) > 1 else ''} {format_ranks(chosen).replace(',', ', ')}"


def end_of(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"
