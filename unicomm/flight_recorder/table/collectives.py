"""The collectives of a table: a number for each, and the rows of all ranks that belong to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind

from .table import Column, Table

_CHUNK = 1 << 20


class CollectiveIndex:
    """Numbers the collectives (group, seq), so that an array can hold an entry for each; a number is a cell.

    Attributes:
        count: the number of cells.
        sparse: whether the numbers `seq` are far apart, which happens in damaged files. Cells are then looked
            up; else they are computed from `base`, `low` and `span`, each by group.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        n = len(table.groups)
        low = np.full(n + 1, np.iinfo(np.int64).max)
        high = np.full(n + 1, -1, np.int64)
        for source in table.sources:
            for group, first in source.first_seq.items():
                low[group] = min(low[group], first)
                high[group] = max(high[group], source.created.get(group, first))
        span = np.where(high >= low, high - low + 1, 0)
        self.sparse = bool(span.sum(dtype=np.float64) > 4 * len(table) + 1_000_000) or bool((span < 0).any())
        if self.sparse:
            rows = np.flatnonzero(table.kind == OpKind.COLLECTIVE)
            keys = np.stack([table.group[rows].astype(np.int64), table.seq[rows]], axis=1)
            self._keys, inverse = np.unique(keys, axis=0, return_inverse=True)
            self._of = np.full(len(table), -1, np.int64)
            self._of[rows] = inverse.reshape(-1)
            self.count = len(self._keys)
            return
        self.low = np.where(span > 0, low, 0)
        self.span = span
        self.base = np.concatenate([[0], np.cumsum(span)[:-1]])
        self.count = int(span.sum())

    def chunks(self) -> Iterator[tuple[Column, Column]]:
        """Yields (rows, cells) of the collectives, in chunks."""
        table, end = self.table, len(self.table)
        collective = table.calls.kind == OpKind.COLLECTIVE
        everything = bool(collective.all()) and not self.sparse
        for at in range(0, end, _CHUNK):
            stop = min(at + _CHUNK, end)
            group, seq = table.group[at:stop], table.seq[at:stop]
            if self.sparse:
                cell = self._of[at:stop]
                inside = cell >= 0
            else:
                offset = seq - self.low[group]
                inside = (group >= 0) & (offset >= 0) & (offset < self.span[group])
                if not everything:
                    inside &= collective[table.call[at:stop]]
                cell = self.base[group] + offset
            if inside.all():
                yield np.arange(at, stop), cell
            else:
                rows = np.flatnonzero(inside)
                yield rows + at, cell[rows]

    def key(self, cell: int) -> tuple[int, int]:
        """Returns (group, seq) of a cell."""
        if self.sparse:
            return int(self._keys[cell][0]), int(self._keys[cell][1])
        group = int(np.searchsorted(self.base, cell, side="right")) - 1
        while not self.span[group]:
            group -= 1
        return group, cell - int(self.base[group]) + int(self.low[group])


@dataclass
class CollectiveRows:
    """The rows of one collective, on all ranks that have it."""

    group: int
    seq: int
    rows: Column


def rows_of(table: Table, cells: CollectiveIndex, chosen: list[int]) -> Iterator[CollectiveRows]:
    """Yields the rows of each of the chosen cells."""
    if not chosen:
        return
    place = np.full(cells.count, -1, np.int32)
    place[chosen] = np.arange(len(chosen))
    found, where = (
        [np.zeros(0, np.int64)],
        [np.zeros(0, np.int32)],
    )  # a dump may name collectives that it has not
    for rows, cell in cells.chunks():
        at = place[cell]
        hit = at >= 0
        if hit.any():
            found.append(rows[hit])
            where.append(at[hit])
    rows, at = np.concatenate(found), np.concatenate(where)
    order = np.argsort(at, kind="stable")
    bounds = np.searchsorted(at[order], np.arange(len(chosen) + 1))
    for i, index in enumerate(chosen):
        group, seq = cells.key(index)
        yield CollectiveRows(group, seq, rows[order[bounds[i] : bounds[i + 1]]])
