"""Offsets between the ranks' clocks, from the collectives that the ranks completed together.

No rank leaves a synchronizing collective before all ranks have entered it, so they leave it at about the same
time. The completions in each communicator give the offsets between its members' clocks; communicators that
share a clock are then joined one after the other. Ranks on one machine share a clock and need no estimate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.table.clocks import SYNCHRONIZING, grouped_median
from unicomm.flight_recorder.table.table import Column
from unicomm.flight_recorder.texts import format_ranks

from .operation_columns import Operations, TraceFile, dense


@dataclass
class Clocks:
    """The offsets of the ranks' clocks.

    Attributes:
        offsets: nanoseconds by which each rank's clock is ahead of the typical clock of its set in `tied`.
        tied: sets of ranks whose offsets to each other are known, the largest first. A rank that shares
            neither a clock nor a collective with others is alone in its set.
    """

    offsets: dict[int, int]
    tied: list[list[int]]


def align(found: Operations) -> Clocks:
    """Estimates the offsets of the clocks of all ranks in `found`."""
    names: dict[str, int] = {}
    # Includes ranks that issued nothing: they may share another rank's clock.
    ranks = sorted({*found.ranks.tolist(), *(rank for rank in found.clocks if rank >= 0)})
    clock_of = {rank: names.setdefault(found.clocks.get(rank, f"rank {rank}"), len(names)) for rank in ranks}
    of = np.zeros(max(ranks, default=0) + 1, np.int64)
    of[list(clock_of)] = list(clock_of.values())
    groups = _within_groups(found, of)
    of_clock: dict[int, list[int]] = {}
    for number, (_, members) in enumerate(groups):
        for clock in members:
            of_clock.setdefault(clock, []).append(number)
    known: dict[int, float] = {}
    tied: list[set[int]] = []
    # Begins with the communicators that have the most completions, and goes on to those that share a clock.
    for start in sorted(range(len(groups)), key=lambda g: -groups[g][0]):
        if known.keys() & groups[start][1].keys():
            continue
        together: dict[int, float] = {}
        taken: set[int] = set()
        queue = [(0, start)]
        while queue:
            _, number = heapq.heappop(queue)
            if number in taken:
                continue
            taken.add(number)
            members = groups[number][1]
            both = [together[c] - members[c] for c in members if c in together]
            shift = float(np.median(both)) if both else 0.0
            for clock in members:
                if clock not in together:
                    together[clock] = members[clock] + shift
                    for other in of_clock[clock]:
                        heapq.heappush(queue, (-groups[other][0], other))
        typical = float(np.median([together[c] for c in clock_of.values() if c in together]))
        known |= {clock: at - typical for clock, at in together.items()}
        tied.append(set(together))
    tied += [{clock} for clock in names.values() if clock not in known]
    with_clock: dict[int, list[int]] = {}
    for rank, clock in clock_of.items():
        with_clock.setdefault(clock, []).append(rank)
    named = [sorted(rank for clock in clocks for rank in with_clock.get(clock, ())) for clocks in tied]
    named.sort(key=lambda t: (-len(t), t))
    return Clocks({rank: round(known.get(clock_of[rank], 0.0)) for rank in ranks}, named)


def _within_groups(found: Operations, clock_of: Column) -> list[tuple[int, dict[int, float]]]:
    """Returns, for each communicator, the number of compared completions and its members' clock offsets."""
    wanted = np.asarray([op in SYNCHRONIZING for op in found.ops] or [False], np.bool_)
    if not len(found):
        return []
    # Replays are left out: a graph may run on after its last collective, so they do not end together.
    rows = np.flatnonzero(wanted[found.op] & (found.completed_ns > 0) & (found.replay == 0))
    if not len(rows):
        return []
    cells = found.cell[rows]
    members = np.bincount(cells)[cells]
    # Only the collectives that the most ranks completed: their medians are then over the same ranks.
    most = np.zeros(len(found.groups), np.int64)
    np.maximum.at(most, found.group[rows], members)
    full = (members > 1) & (members == most[found.group[rows]])
    rows, cells = rows[full], dense(cells[full])
    if not len(rows):
        return []
    ended = (found.completed_ns[rows] - int(found.completed_ns[rows].min())).astype(np.float64)
    apart = ended - grouped_median(ended, cells, int(cells.max()) + 1)[cells]
    pair = dense(found.group[rows].astype(np.int64), clock_of[found.rank[rows]])
    pairs = int(pair.max()) + 1
    middle = grouped_median(apart, pair, pairs)
    count = np.bincount(pair)
    first = np.zeros(pairs, np.int64)
    first[pair] = rows  # any row of the pair
    out: dict[int, tuple[int, dict[int, float]]] = {}
    for row, clock, weight in zip(first.tolist(), middle.tolist(), count.tolist(), strict=True):
        total, clocks = out.get(int(found.group[row]), (0, {}))
        clocks[int(clock_of[found.rank[row]])] = clock
        out[int(found.group[row])] = (total + weight, clocks)
    return list(out.values())


def remarks(found: Operations, clocks: Clocks, files: list[TraceFile]) -> list[str]:
    """Sentences about what is missing in the traces, and about clocks whose offset is not known."""
    out = []
    dropped = sum(f.dropped for f in files)
    if dropped:
        out.append(f"{dropped} operations are missing: they were beyond what one recording holds")
    present = set(found.ranks.tolist()) | {f.rank for f in files}
    missing = sorted({rank for group in found.groups for rank in group.ranks} - present)
    if missing and files:
        some = format_ranks(missing)
        out.append(
            f"no trace of rank{'s' * (len(missing) > 1)} {_short(some)}: waiting for them is not shown"
        )
    alone = _alone(found) if len(files) > 1 else []
    if alone:
        out.append(
            f"no collective of rank{'s' * (len(alone) > 1)} {_short(format_ranks(alone))} is in another"
            " trace: are the traces of one run and one cycle?"
        )
    if files and clocks.tied[1:]:
        named = "; ".join(format_ranks(t) for t in clocks.tied)
        out.append(
            "the offset between these clocks is not known, so their times cannot be compared: ranks"
            f" {_short(named)}"
        )
    return out


def _alone(found: Operations) -> list[int]:
    """Returns the ranks that share none of their collectives with another rank."""
    rows = np.flatnonzero(found.kind == OpKind.COLLECTIVE)
    size = np.asarray([len(group.ranks) for group in found.groups] or [0])
    rows = rows[size[found.group[rows]] > 1]
    shared = np.bincount(found.cell)[found.cell[rows]] > 1 if len(rows) else np.zeros(0, np.bool_)
    both: list[int] = np.setdiff1d(found.rank[rows], found.rank[rows[shared]]).tolist()
    return both


def _short(text: str) -> str:
    return text if len(text) < 80 else text[:77] + "..."
