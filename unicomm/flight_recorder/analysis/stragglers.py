"""Late ranks, hosts and groups, on aligned clocks, with their waiting, transfer and gap times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.table.clocks import grouped_median
from unicomm.flight_recorder.table.table import Column, Table

from .verdict import Straggler

_SHOWN = 5
_MEANS = ("late_ns", "last", "waiting_ns", "transfer_ns", "gap_ns")  # fields of Lateness and of Straggler
_ENOUGH = 20  # the least number of collectives for calling a rank slow
_PARTS, _SLOW_PARTS = 4, 3  # a slow rank is late in that many parts of the time, not only for a while
# Arrivals of ranks of equal speed differ by up to this much: scheduling, interrupts, other processes. A rank
# that is late by less is nobody's fault, however regular the job is otherwise.
LEAST_LATE_NS = 200_000.0
_OF_SPREAD, _OF_STEP = 6.0, 0.1  # the least lateness beside it, relative to the job's own figures
_CHANCE = 1e-6  # the greatest probability that ranks of equal speed, by chance, look as late as a slow rank
_SURELY = 4.0  # times the least lateness: more makes the finding no surer


@dataclass
class Lateness:
    """Arrival times in the sampled collectives. Arrays are by rank, 0 for a rank without sampled collectives.

    Attributes:
        count: the number of sampled collectives.
        late_ns: the median of the arrival after the typical rank, which is the lower median.
        lost_ns: the time that others lost by waiting for the rank, summed over the collectives in which it
            came last.
        last: the share of its collectives in which it came last.
        lasting: in how many of the `_PARTS` parts of its collectives, in order, it was typically late by more
            than `least_ns`.
        often: the number of its collectives in which it was late by more than `least_ns`.
        waiting_ns, transfer_ns, gap_ns: means, as in `Straggler`.
        spread_ns: the median deviation of arrivals, over all ranks.
        step_ns: the median time from one collective of a rank to its next.
        span_ns: the time that the sample covers.
    """

    count: Column
    late_ns: Column
    lost_ns: Column
    last: Column
    often: Column
    lasting: Column
    waiting_ns: Column
    transfer_ns: Column
    gap_ns: Column
    spread_ns: float
    step_ns: float
    span_ns: float

    @property
    def least_ns(self) -> float:
        """The lateness from which a rank counts as slow."""
        return _least(self.spread_ns, self.step_ns)

    def slow(self) -> list[int]:
        """Returns the ranks that are late all the time, by much more than the spread of arrivals."""
        found = (self.count >= _ENOUGH) & (self.late_ns > self.least_ns) & (self.lasting >= _SLOW_PARTS)
        return [int(r) for r in np.flatnonzero(found) if self._chance(int(r)) < _CHANCE]

    def _chance(self, rank: int) -> float:
        """Returns a bound of the probability that a rank is late so often if all are late equally often.

        Ranks that each work longer at times, in random order, are no fault, although one of them leads in a
        short sample. The bound is Chernoff's for the rank, times the number of ranks.
        """
        count, often = int(self.count[rank]), int(self.often[rank])
        others = (int(self.often.sum()) - often + 1) / (int(self.count.sum()) - count + 2)
        share = often / count
        if share <= others:
            return 1.0
        exponent = share * math.log(share / others)
        if share < 1:
            exponent += (1 - share) * math.log((1 - share) / (1 - others))
        return min(1.0, math.exp(-count * exponent) * np.count_nonzero(self.count))

    def confidence(self, ranks: Column) -> float:
        """Returns how sure it is that the ranks are late, 0.5 ... 0.95.

        It grows with the lateness beyond the least, and with the number of collectives that show it.
        """
        count = self.count[ranks].sum()
        typical = float((self.late_ns[ranks] * self.count[ranks]).sum() / max(count, 1))
        clear = np.clip((typical / self.least_ns - 1) / (_SURELY - 1), 0, 1)
        often = min(1.0, float(count) / max(len(ranks), 1) / (2 * _ENOUGH))
        return 0.5 + 0.45 * float(np.sqrt(clear * often))


def _least(spread_ns: float, step_ns: float) -> float:
    """Returns the lateness from which a rank counts as slow: an absolute least, and two relative ones."""
    return max(_OF_SPREAD * spread_ns, _OF_STEP * step_ns, LEAST_LATE_NS)


def _lasting(rank: Column, arrived: Column, after: Column, late: Column, least_ns: float) -> Column:
    """Returns `Lateness.lasting` of the ranks whose typical lateness exceeds the least; 0 for the others."""
    out = np.zeros(len(late), np.int64)
    for one in np.flatnonzero(late > least_ns).tolist():
        rows = np.flatnonzero(rank == one)
        parts = np.array_split(after[rows[np.argsort(arrived[rows], kind="stable")]], _PARTS)
        out[one] = sum(float(np.median(part)) > least_ns for part in parts if len(part))
    return out


def lateness(table: Table, rows: Column, cell: Column, offsets: Column) -> Lateness | None:
    """Computes the lateness from the sample and offsets of table/clocks.py; None for fewer than 2 rows."""
    if len(rows) < 2:
        return None
    ranks = len(offsets)
    rank = table.rank[rows].astype(np.int64)
    base = int(table.created_ns[rows].min())
    shift = np.nan_to_num(offsets)[rank]
    arrived = (table.created_ns[rows] - base).astype(np.float64) - shift
    ended = (table.completed_ns[rows] - base).astype(np.float64) - shift
    cells = int(cell.max()) + 1
    present = np.bincount(cell, minlength=cells)
    several = present[cell] > 1
    typical = grouped_median(arrived, cell, cells)
    last = np.full(cells, -np.inf)
    np.maximum.at(last, cell, arrived)
    after = arrived - typical[cell]
    is_last = several & (arrived >= last[cell])
    count = np.bincount(rank[several], minlength=ranks)
    safe = np.maximum(count, 1)

    def mean(values: Column) -> Column:
        out: Column = np.bincount(rank[several], weights=values[several], minlength=ranks) / safe
        return out

    order = np.lexsort((arrived, rank))
    gap = np.zeros(len(rows))
    follows = rank[order][1:] == rank[order][:-1]
    gap[order[1:]] = np.where(follows, np.maximum(arrived[order][1:] - ended[order][:-1], 0), 0)
    steps = np.where(follows, np.diff(arrived[order]), np.nan)
    step = float(np.nanmedian(steps)) if follows.any() else 0.0
    late = np.nan_to_num(grouped_median(after[several], rank[several], ranks))
    # Deviations of early ranks count, too; only late ranks can be slow.
    spread = float(np.median(np.abs(after[several] - late[rank[several]]))) if several.any() else 0.0
    late_rows = several & (after > _least(spread, step))
    return Lateness(
        count=count,
        late_ns=late,
        lost_ns=np.bincount(rank[is_last], weights=after[is_last], minlength=ranks),
        last=np.bincount(rank[is_last], minlength=ranks) / safe,
        often=np.bincount(rank[late_rows], minlength=ranks),
        lasting=_lasting(rank[several], arrived[several], after[several], late, _least(spread, step)),
        waiting_ns=mean(last[cell] - arrived),
        transfer_ns=mean(np.maximum(ended - last[cell], 0)),
        gap_ns=mean(gap),
        spread_ns=spread,
        step_ns=step,
        span_ns=float(ended.max() - arrived.min()),
    )


def scores(table: Table, found: Lateness, rows: Column, cell: Column) -> list[Straggler]:
    """Returns the latest ranks, hosts and groups, for the report: none that is late by less than counts."""
    if not found.lost_ns.any():
        return []
    span = max(found.span_ns, 1.0)
    latest = np.argsort(-found.lost_ns, kind="stable")[:_SHOWN].tolist()
    out = [
        _one(f"rank {rank}", "rank", found, np.asarray([rank]), span, rank)
        for rank in latest
        if found.count[rank] and found.late_ns[rank] > LEAST_LATE_NS
    ]
    if not out:
        return []
    hosts: dict[str, list[int]] = {}
    for source in table.sources:
        if source.host and source.rank < len(found.count) and found.count[source.rank]:
            hosts.setdefault(source.host, []).append(source.rank)
    if len(hosts) > 1:
        by_host = [_one(f"host {h}", "host", found, np.asarray(r), span) for h, r in hosts.items()]
        out += sorted(by_host, key=lambda s: -s.score)[:_SHOWN]
    groups = np.unique(table.group[rows])
    if 1 < len(groups) <= 4096:
        by_group = []
        for index in groups.tolist():
            group = table.groups[index]
            members = group.ranks[group.ranks < len(found.count)]
            members = members[found.count[members] > 0]
            if len(members):
                by_group.append(_one(f"group {group.name}", "group", found, members, span))
        out += sorted(by_group, key=lambda s: -s.score)[:_SHOWN]
    return out


def _one(who: str, kind: str, found: Lateness, ranks: Column, span: float, rank: int = -1) -> Straggler:
    count = int(found.count[ranks].sum())

    def mean(values: Column) -> float:
        return float((values[ranks] * found.count[ranks]).sum() / max(count, 1))

    return Straggler(
        who=who,
        kind=kind,
        score=min(1.0, float(found.lost_ns[ranks].sum()) / span),
        **{name: mean(getattr(found, name)) for name in _MEANS},
        collectives=count if rank >= 0 else count // max(len(ranks), 1),
        rank=rank,
        confidence=found.confidence(ranks),
    )
