"""The ranks' clocks put onto one, by the collectives that the ranks completed together.

No rank leaves a collective that synchronizes before all have come, so its ranks leave it at about one time.
In each communicator that gives its members' clocks against each other; communicators that share a rank are
then joined one after the other. (The flight recorder, which looks at jobs that still run, estimates instead.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.clocks import SYNCHRONIZING, grouped_median
from unicomm.flight_recorder.ranks import format_ranks

from .operations import Operations, TraceFile, dense


@dataclass
class Clocks:
    """What is known of the clocks.

    Attributes:
        offsets: nanoseconds by which each rank's clock is ahead of the typical one it is tied to.
        tied: ranks whose clocks are known against each other, the most first; a rank that has no collective
            in common with others stands alone.
    """

    offsets: dict[int, int]
    tied: list[list[int]]


def align(found: Operations) -> Clocks:
    """The clocks of the ranks in `found`."""
    ranks: list[int] = found.ranks.tolist()
    known: dict[int, float] = {}
    tied: list[list[int]] = []
    groups = _within_groups(found)
    of_rank: dict[int, list[int]] = {}
    for number, (_, members) in enumerate(groups):
        for rank in members:
            of_rank.setdefault(rank, []).append(number)
    # The communicators with the most to go by first.
    left = sorted(range(len(groups)), key=lambda g: -groups[g][0])
    taken = [False] * len(groups)
    for start in left:
        if taken[start]:
            continue
        together: dict[int, float] = {}
        queue = [(0, start)]
        while queue:
            _, number = heapq.heappop(queue)
            if taken[number]:
                continue
            taken[number] = True
            members = groups[number][1]
            both = [together[r] - members[r] for r in members if r in together]
            shift = float(np.median(both)) if both else 0.0
            for rank in members:
                if rank not in together:
                    together[rank] = members[rank] + shift
                    for other in of_rank[rank]:
                        heapq.heappush(queue, (-groups[other][0], other))
        typical = float(np.median(list(together.values())))
        known |= {rank: at - typical for rank, at in together.items()}
        tied.append(sorted(together))
    tied += [[rank] for rank in ranks if rank not in known]
    tied.sort(key=lambda t: (-len(t), t))
    return Clocks({rank: round(known.get(rank, 0.0)) for rank in ranks}, tied)


def _within_groups(found: Operations) -> list[tuple[int, dict[int, float]]]:
    """Of each communicator: how many completions there are to compare, and its members' clocks by them."""
    wanted = np.asarray([op in SYNCHRONIZING for op in found.ops] or [False], np.bool_)
    if not len(found):
        return []
    rows = np.flatnonzero(wanted[found.op] & (found.completed_ns > 0))
    if not len(rows):
        return []
    cells = found.cell[rows]
    members = np.bincount(cells)[cells]
    # Of a communicator those that most of its ranks completed: the median is then always of the same ranks.
    most = np.zeros(len(found.groups), np.int64)
    np.maximum.at(most, found.group[rows], members)
    full = (members > 1) & (members == most[found.group[rows]])
    rows, cells = rows[full], dense(cells[full])
    if not len(rows):
        return []
    ended = (found.completed_ns[rows] - int(found.completed_ns[rows].min())).astype(np.float64)
    apart = ended - grouped_median(ended, cells, int(cells.max()) + 1)[cells]
    pair = dense(found.group[rows].astype(np.int64), found.rank[rows].astype(np.int64))
    pairs = int(pair.max()) + 1
    middle = grouped_median(apart, pair, pairs)
    count = np.bincount(pair)
    first = np.zeros(pairs, np.int64)
    first[pair] = rows  # any row of the pair
    out: dict[int, tuple[int, dict[int, float]]] = {}
    for row, clock, weight in zip(first.tolist(), middle.tolist(), count.tolist(), strict=True):
        total, clocks = out.get(int(found.group[row]), (0, {}))
        clocks[int(found.rank[row])] = clock
        out[int(found.group[row])] = (total + weight, clocks)
    return list(out.values())


def remarks(found: Operations, clocks: Clocks, files: list[TraceFile]) -> list[str]:
    """What a reader of the figures should know: what is missing, and clocks that nothing ties."""
    out = []
    dropped = sum(f.dropped for f in files)
    if dropped:
        out.append(f"{dropped} operations are missing: they were beyond what one recording holds")
    present = set(found.ranks.tolist()) | {f.rank for f in files}
    missing = sorted({rank for group in found.groups for rank in group.ranks} - present)
    if missing and files:
        some = format_ranks(missing)
        out.append(
            f"no trace of rank{'s' * (len(missing) > 1)} {_short(some)}: nobody is seen to wait for them"
        )
    hosts = {f.host for f in files}
    apart = clocks.tied[1:]
    if apart and (len(hosts) != 1 or "" in hosts):
        named = "; ".join(format_ranks(t) for t in clocks.tied)
        out.append(
            f"nothing tells how far these clocks are apart, so their times do not compare: ranks"
            f" {_short(named)}. They completed no collective together:"
            " are the traces of one run and one cycle?"
        )
    return out


def _short(text: str) -> str:
    return text if len(text) < 80 else text[:77] + "..."
