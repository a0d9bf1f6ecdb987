"""Totals: counters by rank, communicator and operation, summed over the operations of tables."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unicomm.flight_recorder.formats.operation_names import item_size
from unicomm.flight_recorder.ring.reader import CAPTURED, State
from unicomm.flight_recorder.table.collectives import CollectiveIndex
from unicomm.flight_recorder.table.table import Column, Group, Table

from .catalogue import COLLECTIVES, FAILURES, IO, LOST, OPERATIONS, OTHER, TIME, WAITING, Metric

MOST_COMMUNICATORS, MOST_OPERATIONS = 64, 64  # values of a label: a program may create groups without end
_MEASURES = (OPERATIONS, FAILURES, IO, TIME, WAITING)
_NS = 1e-9

Sample = tuple[Metric, tuple[str, ...], float]  # a metric, the values of its labels, its value


class Totals:
    """Counters of a job. They only grow, also if a rank is restarted."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str, str], Column] = {}
        self._collectives: dict[tuple[int, str], int] = {}
        self._newest: dict[tuple[int, tuple[str, ...]], int] = {}
        self._lost: dict[int, int] = {}
        self._names: dict[tuple[str, ...], str] = {}  # of communicators, by identity
        self._operations: set[str] = set()

    def communicator(self, group: Group | None) -> str:
        """Returns the label of a group, which stays the same when groups that come later share its name."""
        if group is None:
            return OTHER
        key = (group.uid,) if group.uid else (group.name, str(group.ranks.tolist()))
        if key not in self._names:
            known = set(self._names.values())
            self._names[key] = group.name if group.name in known or len(known) < MOST_COMMUNICATORS else OTHER
        return self._names[key]

    def operation(self, name: str) -> str:
        """Returns the label of an operation. Dumps of unknown origin may have any number of names."""
        if name not in self._operations and len(self._operations) >= MOST_OPERATIONS:
            return OTHER
        self._operations.add(name)
        return name

    def lose(self, rank: int, records: int) -> None:
        """Notes that records of a rank were overwritten before they were counted."""
        self._lost[rank] = self._lost.get(rank, 0) + records

    def add(self, table: Table, fresh: Column | None = None, offsets: Column | None = None) -> None:
        """Counts the rows of a table that have ended.

        Args:
            table: has all that is known, so that the last rank of each collective is found.
            fresh: for each row, whether it may be counted; None for all.
            offsets: each rank's clock minus the typical one, in nanoseconds, by rank.
        """
        self._count_collectives(table)
        counted = (table.state >= State.COMPLETED) & ((table.flags & CAPTURED) == 0)
        if fresh is not None:
            counted &= fresh
        rows = np.flatnonzero(counted)
        if not len(rows):
            return
        began = np.where(table.started_ns > 0, table.started_ns, table.created_ns)
        ended = np.maximum(table.completed_ns, began)
        lasted = np.where((table.completed_ns > 0) & (began > 0), ended - began, 0)
        waited = self._waiting(table, began, lasted, offsets)
        op = table.calls.op[table.call[rows]]
        groups, ops = len(table.groups) + 1, len(table.ops)
        key = (table.rank[rows].astype(np.int64) * groups + table.group[rows] + 1) * ops + op
        keys, inverse = np.unique(key, return_inverse=True)
        inverse = inverse.reshape(-1)
        weights = (
            None,
            (table.state[rows] == State.FAILED).astype(float),
            _sizes(table)[table.call[rows]],
            lasted[rows] * _NS,
            waited[rows] * _NS,
        )
        sums = np.stack([np.bincount(inverse, weights=w, minlength=len(keys)) for w in weights], axis=1)
        for one, values in zip(keys.tolist(), sums, strict=True):
            rest, number = divmod(one, ops)
            rank, group = divmod(rest, groups)
            name = self.communicator(table.groups[group - 1] if group else None)
            label = (rank, name, self.operation(table.ops[number]))
            self._sums[label] = self._sums[label] + values if label in self._sums else values

    def _count_collectives(self, table: Table) -> None:
        for source in table.sources:
            for index, newest in source.created.items():
                group = table.groups[index]
                key = (source.rank, (group.uid or group.name, str(len(group.ranks))))
                more = newest - self._newest.get(key, 0)
                self._newest[key] = newest
                label = (source.rank, self.communicator(group))
                # A number that falls is another communicator of that name, which counts from 1 again.
                self._collectives[label] = self._collectives.get(label, 0) + (more if more >= 0 else newest)

    @staticmethod
    def _waiting(table: Table, began: Column, lasted: Column, offsets: Column | None) -> Column:
        """Returns for each row the time in a collective before its last rank had joined; 0 for messages."""
        waited = np.zeros(len(table), np.int64)
        cells = CollectiveIndex(table)
        if not cells.count:
            return waited
        aligned = began
        if offsets is not None and len(offsets):
            aligned = began - np.nan_to_num(offsets).astype(np.int64)[table.rank]
        last = np.zeros(cells.count, np.int64)
        for rows, cell in cells.chunks():
            np.maximum.at(last, cell, np.where(began[rows] > 0, aligned[rows], 0))
        for rows, cell in cells.chunks():
            waited[rows] = np.clip(last[cell] - aligned[rows], 0, lasted[rows])
        return waited

    def samples(self) -> Iterator[Sample]:
        """Yields the counters."""
        for (rank, communicator, operation), values in sorted(self._sums.items()):
            for metric, value in zip(_MEASURES, values.tolist(), strict=True):
                yield metric, (str(rank), communicator, operation), value
        for (rank, communicator), count in sorted(self._collectives.items()):
            yield COLLECTIVES, (str(rank), communicator), count
        for rank, lost in sorted(self._lost.items()):
            yield LOST, (str(rank),), lost


def _sizes(table: Table) -> Column:
    """Returns the bytes of each call's inputs, or of its outputs if it has no inputs."""
    calls = table.calls
    width = np.asarray([item_size(name) for name in table.dtypes], np.float64)
    inputs, outputs = np.maximum(calls.in_numel, 0), np.maximum(calls.out_numel, 0)
    sizes: Column = np.where(inputs > 0, inputs * width[calls.in_dtype], outputs * width[calls.out_dtype])
    return sizes
