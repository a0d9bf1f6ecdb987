"""compare: two runs, with the first operation and the first data that differ, and the changed times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.rows import place
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.table.table_store import Interner

from .data_diff import DataComparison, compare_data

_SEQ_BITS = 36


@dataclass
class Difference:
    """The first operation in which ranks of run A differ from run B.

    Attributes:
        ranks: the ranks that differ in the same way.
        seq_num: the number of the collective in the group, or of the message in its pair.
        peer: the peer of a message, -1 for collectives.
        a, b: the calls with their arguments in A and B; "" if the run has no such operation.
        a_where, b_where: file:line, "" if unknown.
        a_ns: the time of the call in A (in B if A has none), after the run's first operation.
    """

    ranks: list[int]
    group: str
    seq_num: int
    peer: int
    a: str
    b: str
    a_where: str
    b_where: str
    a_ns: int


@dataclass
class Change:
    """The times of one call in one group in both runs, over all ranks, in nanoseconds; 0 without a call."""

    call: str
    group: str
    a_count: int
    b_count: int
    a_median_ns: float
    b_median_ns: float
    a_total_ns: float
    b_total_ns: float

    @property
    def ratio(self) -> float:
        """The median time in B divided by that in A; nan if a run has no such call."""
        known = self.a_median_ns > 0 and self.b_count
        return self.b_median_ns / self.a_median_ns if known else float("nan")


@dataclass
class Diff:
    """The difference of two runs.

    Attributes:
        differences: in order of time.
        changes: the calls, with the greatest change of the total time first.
        compared: the number of operations that are in both runs.
        data: what the checksums of the operations that are alike tell.
        only_a, only_b: the ranks that only one run has.
    """

    differences: list[Difference]
    changes: list[Change]
    compared: int
    data: DataComparison
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether the runs have the same ranks, the same operations and, as far as known, the same data."""
        return not (self.differences or self.only_a or self.only_b or self.data.first)

    def as_data(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"same": self.same, **asdict(self)}


@dataclass
class _Side:
    """One run, with numbers for channels and calls that are the same for both runs."""

    table: Table
    rows: Column
    key: Column  # channel and sequence number, sorted
    call: Column
    channel: Column  # of each entry of `key`


def compare(a: Table, b: Table) -> Diff:
    """Compares two runs: collectives by group and number, messages by pair and number."""
    first, second = _sides(a, b)
    in_b = np.isin(first.key, second.key)
    in_a = np.isin(second.key, first.key)
    unequal = first.call[in_b] != second.call[in_a]
    at_a, at_b = np.flatnonzero(in_b)[unequal], np.flatnonzero(in_a)[unequal]
    # The first operation of each channel that differs.
    channels, at = np.unique(first.channel[at_a], return_index=True)
    found = dict(zip(channels.tolist(), zip(at_a[at].tolist(), at_b[at].tolist(), strict=True), strict=True))
    for channel, i, j in _ends(first, second):
        found.setdefault(channel, (i, j))
    ranks_a, ranks_b = set(a.source_of), set(b.source_of)
    common = ranks_a & ranks_b
    return Diff(
        _differences(first, second, found, common),
        _changes(a, b),
        int(in_b.sum()),
        compare_data(a, b, first.rows[in_b][~unequal], second.rows[in_a][~unequal]),
        sorted(ranks_a - ranks_b),
        sorted(ranks_b - ranks_a),
    )


def _sides(a: Table, b: Table) -> tuple[_Side, _Side]:
    # Equal values of both runs get one number.
    groups: Interner[tuple[Any, ...]] = Interner()
    calls: Interner[tuple[Any, ...]] = Interner()
    with_root = all(
        (t.calls.root >= 0).any() for t in (a, b)
    )  # torch's dumps have neither roots nor reductions
    with_reduction = all(len(t.reductions) > 1 for t in (a, b))
    numbers = []
    for table in (a, b):
        several: Counter[tuple[Any, ...]] = Counter()
        group_numbers = []
        for g in table.groups:
            alike = (g.recorded, tuple(g.ranks.tolist()))
            several[alike] += 1
            group_numbers.append(groups((*alike, several[alike])))
        signatures = [_signature(table, i, with_root, with_reduction) for i in range(len(table.calls))]
        rows = np.flatnonzero(
            (table.calls.kind[table.call] != OpKind.OTHER) & (table.group >= 0) & (table.seq >= 0)
        )
        numbers.append(
            (table, rows, np.asarray(group_numbers or [0]), np.asarray([calls(s) for s in signatures] or [0]))
        )
    channels = []
    for table, rows, group, _ in numbers:
        kind = table.calls.kind[table.call[rows]].astype(np.int64)
        most = np.int64(1 << 22)
        channel = (group[table.group[rows]] * 3 + kind) * most + table.rank[rows]
        channels.append(channel * most + table.peer[rows] + 1)
    _, inverse = np.unique(np.concatenate(channels), return_inverse=True)
    parts = np.split(inverse.reshape(-1), [len(channels[0])])
    out = []
    for (table, rows, _, call), channel in zip(numbers, parts, strict=True):
        key = (channel.astype(np.int64) << _SEQ_BITS) | (table.seq[rows] & ((1 << _SEQ_BITS) - 1))
        key, first = np.unique(key, return_index=True)
        own = rows[first]
        out.append(_Side(table, own, key, call[table.call[own]], key >> _SEQ_BITS))
    return out[0], out[1]


def _signature(table: Table, call: int, with_root: bool, with_reduction: bool) -> tuple[Any, ...]:
    calls = table.calls
    return (
        table.ops[int(calls.op[call])],
        table.reductions[int(calls.red[call])] if with_reduction else "",
        int(calls.root[call]) if with_root else -1,
        table.dtypes[int(calls.in_dtype[call])],
        table.dtypes[int(calls.out_dtype[call])],
        int(calls.in_numel[call]),
        int(calls.out_numel[call]),
        table.shapes[int(calls.in_shape[call])],
        table.shapes[int(calls.out_shape[call])],
    )


def _ends(a: _Side, b: _Side) -> Iterator[tuple[int, int, int]]:
    """Yields channels that are longer in one run: (channel, next entry in A or -1, next entry in B or -1)."""
    for side, other, flip in ((a, b, False), (b, a, True)):
        channels, last = np.unique(other.channel, return_index=True)
        ends = np.append(last, len(other.channel))[1:] - 1
        newest = dict(zip(channels.tolist(), other.key[ends].tolist(), strict=True))
        own, begins = np.unique(side.channel, return_index=True)
        for channel, begin in zip(own.tolist(), begins.tolist(), strict=True):
            after = newest.get(channel, (channel << _SEQ_BITS) - 1)
            at = max(int(np.searchsorted(side.key, after, "right")), begin)
            if at < len(side.key) and side.channel[at] == channel:
                yield (channel, -1, at) if flip else (channel, at, -1)


def _differences(a: _Side, b: _Side, found: dict[int, tuple[int, int]], common: set[int]) -> list[Difference]:
    start = [int(s.table.created_ns.min()) if len(s.table) else 0 for s in (a, b)]
    joined: dict[tuple[Any, ...], Difference] = {}
    for i, j in found.values():
        side, at, began = (a, i, start[0]) if i >= 0 else (b, j, start[1])
        row = int(side.rows[at])
        rank = int(side.table.rank[row])
        if rank not in common:
            continue
        texts = [
            (s.table.describe(int(s.rows[k])), place(s.table, int(s.rows[k]))) if k >= 0 else ("", "")
            for s, k in ((a, i), (b, j))
        ]
        one = Difference(
            [rank],
            side.table.groups[int(side.table.group[row])].name,
            int(side.table.seq[row]),
            int(side.table.peer[row]),
            texts[0][0],
            texts[1][0],
            texts[0][1],
            texts[1][1],
            int(side.table.created_ns[row]) - began,
        )
        key = (one.group, one.seq_num, one.peer, one.a, one.b, one.a_where, one.b_where)
        same = joined.setdefault(key, one)
        if same is not one:
            same.ranks.append(rank)
            same.a_ns = min(same.a_ns, one.a_ns)
    for difference in joined.values():
        difference.ranks.sort()
    return sorted(joined.values(), key=lambda d: (d.a_ns, d.ranks))


def _changes(a: Table, b: Table) -> list[Change]:
    """Returns the changes, with the greatest difference of the total time first."""
    times: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for which, table in enumerate((a, b)):
        for key, count, median, total in _times(table):
            none = (0, 0.0, 0.0)
            times.setdefault(key, [none, none])[which] = (count, median, total)
    out = [Change(call, group, x[0], y[0], x[1], y[1], x[2], y[2]) for (call, group), (x, y) in times.items()]
    return sorted(out, key=lambda c: -abs(c.b_total_ns - c.a_total_ns))


def _times(table: Table) -> Iterator[tuple[tuple[str, str], int, float, float]]:
    """Yields ((call, group), count, median time, total time) of the completed operations."""
    rows = np.flatnonzero(
        (table.state == State.COMPLETED)
        & (table.completed_ns > 0)
        & (table.group >= 0)
        & (table.calls.kind[table.call] != OpKind.OTHER)
    )
    began = np.where(table.started_ns[rows] > 0, table.started_ns[rows], table.created_ns[rows])
    took = np.maximum(table.completed_ns[rows] - began, 0)
    key = table.call[rows].astype(np.int64) * max(len(table.groups), 1) + table.group[rows]
    order = np.lexsort((took, key))
    key, took = key[order], took[order]
    keys, begins = np.unique(key, return_index=True)
    joined: dict[tuple[str, str], list[Column]] = {}
    for k, part in zip(keys.tolist(), np.split(took, begins)[1:], strict=True):
        call, group = divmod(k, max(len(table.groups), 1))
        name = (table.describe_call(call), table.groups[group].recorded)
        joined.setdefault(name, []).append(part)
    for name, parts in joined.items():
        every = np.concatenate(parts)
        yield name, len(every), float(np.median(every)), float(every.sum())
