"""Operations of several ranks on one clock: when each began, when its last rank joined, when it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Finding, Report
from unicomm.flight_recorder.formats.operation_names import OpKind, kind
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.table import Column, Table


@dataclass
class Timeline:
    """Rows of a table with times on one clock, in nanoseconds since 1970.

    Attributes:
        rows: the rows of the table, by rank, then in the order of issue.
        begin_ns: when the rank issued the operation.
        ready_ns: when the last recorded rank issued it; `begin_ns` for messages.
        end_ns: when it ended; the end of the recording for an unfinished operation.
        open: whether it is unfinished.
        first_ns, last_ns: the time span; it ends with the recording of the ranks that are alive.
    """

    rows: Column
    begin_ns: Column
    ready_ns: Column
    end_ns: Column
    open: Column
    first_ns: int
    last_ns: int


def build(report: Report, table: Table, ranks: Iterable[int], most_per_rank: int) -> Timeline:
    """Returns the last `most_per_rank` operations of `ranks`. `ready_ns` considers the calls of all ranks."""
    shift = np.zeros(int(table.ranks.max(initial=0)) + 1, np.int64)
    for rank, offset in report.clock_offsets_ns.items():
        shift[rank] = offset
    chosen = set(ranks)
    every, own = [np.zeros(0, np.int64)], []
    for source in table.sources:
        rows = np.arange(max(source.begin, source.end - most_per_rank), source.end)
        every.append(rows)
        if source.rank in chosen:
            own.append((source.rank, rows))
    rows = np.concatenate([every[0], *(rows for _, rows in sorted(own, key=lambda o: o[0]))])
    # A clock that is off by more than the years since 1970 is damaged; pictures have no times before that.
    begin = np.maximum(table.created_ns[rows] - shift[table.rank[rows]], 0)
    end = np.maximum(table.completed_ns[rows] - shift[table.rank[rows]], 0)
    over = (table.state[rows] == State.COMPLETED) | (table.state[rows] == State.FAILED)
    ended = table.completed_ns[rows] != 0
    alive = [
        source.as_of_ns - int(shift[source.rank])
        for source in table.sources
        if source.as_of_ns and source.rank in chosen
    ]
    first = int(begin.min(initial=np.iinfo(np.int64).max)) if len(rows) else 0
    last = max([int(begin.max(initial=0)), int(end[ended].max(initial=0)), *alive])
    if not alive:  # dumps do not tell how long a stuck operation has lasted: draw a small share
        last += max((last - first) // 20, 1000)
    end = np.where(over & ended, end, np.where(over, begin, last))
    ready = _ready(table, np.concatenate(every), rows, begin, shift)
    return Timeline(rows, begin, np.minimum(ready, end), np.maximum(end, begin), ~over, first, last)


def since(report: Report, table: Table) -> int:
    """Returns when the main finding began, on the clock of the timeline; 0 if it is unknown."""
    at = report.main.since_ns
    rows = np.flatnonzero(table.created_ns == at)
    if not at or not len(rows):
        return at
    return at - report.clock_offsets_ns.get(int(table.rank[rows[0]]), 0)


def of_finding(found: Finding, table: Table, rows: Column) -> Column:
    """Returns for each row whether it belongs to the operation of a finding.

    Collectives belong to it by their number, also if they are other operations. Messages are numbered by
    pair, so they belong to it if they are of a culprit.
    """
    groups = [i for i, group in enumerate(table.groups) if group.name == found.group]
    mine: Column = np.isin(table.group[rows], groups) & (table.seq[rows] == found.seq_num)
    mine &= found.seq_num >= 0
    kinds = table.calls.kind[table.call[rows]]
    if kind(found.operation) is OpKind.COLLECTIVE:
        mine &= kinds == OpKind.COLLECTIVE
        return mine
    messages = (kinds == OpKind.SEND) | (kinds == OpKind.RECV)
    of_culprit = np.isin(table.rank[rows], found.culprits) | np.isin(table.peer[rows], found.culprits)
    mine &= messages & of_culprit
    return mine


def _key(table: Table, rows: Column) -> Column:
    key: Column = (table.group[rows].astype(np.int64) << 40) | (table.seq[rows] & ((1 << 40) - 1))
    return key


def _ready(table: Table, every: Column, rows: Column, begin: Column, shift: Column) -> Column:
    """Returns for each row when the last rank issued its collective."""
    kinds = table.calls.kind[table.call[every]]
    every = every[(kinds == OpKind.COLLECTIVE) & (table.group[every] >= 0)]
    keys, inverse = np.unique(_key(table, every), return_inverse=True)
    last = np.zeros(len(keys), np.int64)
    np.maximum.at(last, inverse, table.created_ns[every] - shift[table.rank[every]])
    ready = begin.copy()
    mine = np.flatnonzero(table.calls.kind[table.call[rows]] == OpKind.COLLECTIVE)
    if len(keys) and len(mine):
        wanted = _key(table, rows[mine])
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        ready[mine] = np.where(keys[at] == wanted, np.maximum(last[at], begin[mine]), begin[mine])
    return ready
