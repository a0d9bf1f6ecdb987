"""The operations of the ranks as the data of timeline.js, in few bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Finding, Report
from unicomm.flight_recorder.ring.call_path import user_frame
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.table import KILLED, STOPPED, Table

from . import timeline

MOST_RANKS = 64  # the maximum number of ranks in the timeline
_MOST_SLICES = 16_000  # about 20 bytes each
_STATES = {State.CREATED: "waits to start", State.STARTED: "in progress", State.FAILED: "failed"}


def chosen_ranks(report: Report, table: Table) -> list[int]:
    """Returns the ranks in the timeline: all, or the first of each finding and a sample of the rest."""
    every = [int(rank) for rank in table.ranks]
    if len(every) <= MOST_RANKS:
        return every
    known = set(every)
    wanted: dict[int, None] = {}
    for found in report.findings[:8]:
        wanted |= dict.fromkeys(found.culprits[:16])
        for edge in found.edges[:16]:
            wanted |= dict.fromkeys([edge.rank, *edge.waits_for[:4]])
    wanted |= dict.fromkeys(s.rank for s in report.stragglers[:4])
    wanted |= dict.fromkeys(report.main.victims[:8])
    chosen = [rank for rank in wanted if rank in known][: MOST_RANKS * 3 // 4]
    rest = [rank for rank in every if rank not in set(chosen)]
    even = np.linspace(0, len(rest) - 1, MOST_RANKS - len(chosen)).astype(int)
    return sorted({*chosen, *(rest[i] for i in even)})


def most_per_rank(ranks: list[int]) -> int:
    return max(50, _MOST_SLICES // max(len(ranks), 1))


def timeline_data(report: Report, table: Table, culprits: set[int]) -> dict[str, Any]:
    """Returns the data of the timeline, with times in tenths of a microsecond.

    `slices` has a value for each operation: `begin` and `seq` as differences to the operation before, the
    time until the last rank joined (`wait`) and until the end (`last`), and the `kind`, an index into
    `kinds`. A kind is what many operations share: call, group and frame (indices into `calls`, `groups` and
    `places`), state, whether it belongs to the main finding, and peer. `culprits` are marked.
    """
    ranks = chosen_ranks(report, table)
    line = timeline.build(report, table, ranks, most_per_rank(ranks))
    rows, main = line.rows, report.main
    calls, call = np.unique(table.call[rows], return_inverse=True)
    frames, frame = np.unique(table.frame[rows], return_inverse=True)
    groups, group = np.unique(table.group[rows], return_inverse=True)
    op = table.calls.op[calls] if len(calls) else calls
    common = [int(o) for o, _ in Counter(table.calls.op[table.call[rows]].tolist()).most_common()]
    rank = table.rank[rows]
    marked = timeline.of_finding(main, table, rows)
    columns = (call, group, frame, table.state[rows], marked, table.peer[rows])
    together = np.stack([np.asarray(c, np.int64).reshape(-1) for c in columns], axis=1)
    kinds, kind = np.unique(together, axis=0, return_inverse=True)
    often = np.argsort(-np.bincount(kind.reshape(-1), minlength=len(kinds)), kind="stable")
    place = np.empty(len(kinds), np.int64)
    place[often] = np.arange(len(kinds))
    slices = {
        "begin": _steps(_tenths(line.begin_ns - line.first_ns)),
        "wait": _tenths(line.ready_ns - line.begin_ns).tolist(),
        "last": _tenths(line.end_ns - line.begin_ns).tolist(),
        "seq": _steps(table.seq[rows].astype(np.int64)),
        "kind": place[kind.reshape(-1)].tolist(),
    }
    ends = np.searchsorted(rank, ranks, "right") if len(rows) else np.zeros(len(ranks), np.int64)
    begins = np.searchsorted(rank, ranks, "left") if len(rows) else ends
    since = timeline.since(report, table)
    victims = set(main.victims) - culprits
    busy = marked | line.open
    known = main.operation and main.seq_num >= 0
    missed = f"not in {main.operation} #{main.seq_num}" if known else ""
    process = {source.rank: source.process for source in table.sources}

    def absent(rank: int) -> str:
        if not missed or rank not in main.culprits:
            return ""
        return ", ".join(filter(None, (_end(main, process.get(rank, "")), missed)))

    return {
        "ranks": [
            {
                "rank": r,
                "tone": "bad" if r in culprits else "warn" if r in victims else "",
                "note": process.get(r, "no file"),
                "absent": absent(r) if not busy[begins[i] : ends[i]].any() else "",
                "from": int(begins[i]),
                "to": int(ends[i]),
            }
            for i, r in enumerate(ranks)
        ],
        "slices": slices,
        "kinds": kinds[often].tolist(),
        "calls": [table.describe_call(int(c)) for c in calls],
        "colours": [common.index(int(o)) for o in op],
        "ops": [table.ops[o] for o in common],
        "groups": [table.groups[int(g)].name if g >= 0 else "?" for g in groups],
        "places": [_place(table, int(f)) for f in frames],
        "states": {int(state): text for state, text in _STATES.items()},
        "span": int(_tenths(np.asarray([line.last_ns - line.first_ns]))[0]),
        "since": (since - line.first_ns) // 100 if since > line.first_ns else None,
    }


def _end(found: Finding, process: str) -> str:
    """Returns how the culprit's process ended, in few words; "" if it is unknown."""
    cause = found.cause
    if cause is None or len(found.culprits) != 1:
        return f"process {process}" if process in (KILLED, STOPPED) else ""
    if cause.exception:
        return f"raised {cause.exception}"
    if cause.signal:
        return f"ended by {cause.signal}"
    return "" if cause.exit_code is None else f"exit code {cause.exit_code}"


def _tenths(ns: Any) -> Any:
    """Returns times in tenths of a microsecond."""
    return np.rint(np.asarray(ns) / 100).astype(np.int64)


def _steps(values: Any) -> list[int]:
    """Returns the differences between values, which take fewer digits than these."""
    out: list[int] = np.diff(values, prepend=0).tolist()
    return out


def _place(table: Table, stack: int) -> str:
    """Returns file name, line and function; without the folder, because the page may be given to others."""
    frame = user_frame(table.stacks[stack])
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}" if frame else ""
