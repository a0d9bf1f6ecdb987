"""The offsets between the ranks' clocks, estimated from the completion times of collectives."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.formats.operation_names import COLLECTIVES
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.collectives import CollectiveIndex, rows_of

from .table import Column, Table

# No rank completes one of these before all ranks have joined, so all complete it at about the same time.
SYNCHRONIZING = COLLECTIVES - {"broadcast", "reduce", "scatter", "gather", "gather_single"}
_MOST_ROWS = 1_000_000
_ROUNDS = 3


def sample(table: Table, cells: CollectiveIndex, most_rows: int = _MOST_ROWS) -> tuple[Column, Column]:
    """Selects the newest synchronizing collectives of each group.

    Returns their completed rows, and for each row the number of its collective, from 0.
    """
    spans: dict[int, Column] = {}  # the cells of each group with more than one rank
    for index, group in enumerate(table.groups if not cells.sparse else ()):
        if group.size > 1 and cells.span[index]:
            spans[index] = int(cells.base[index]) + np.arange(int(cells.span[index]))
    total = sum(len(c) * table.groups[g].size for g, c in spans.items())
    share = min(1.0, most_rows / max(total, 1))
    chosen: list[int] = []
    for found in spans.values():
        keep = max(2, int(len(found) * share))
        chosen.extend(found[-keep:].tolist())
    parts = [d.rows for d in rows_of(table, cells, chosen)]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = np.concatenate(parts)
    cell = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    wanted = np.isin(np.asarray(table.ops, object).astype(str), list(SYNCHRONIZING))[table.calls.op]
    good = wanted[table.call[rows]] & (table.state[rows] == State.COMPLETED)
    good &= (table.completed_ns[rows] > 0) & (table.created_ns[rows] > 0)
    return rows[good], cell[good]


def grouped_median(values: Column, key: Column, count: int) -> Column:
    """Returns the lower median of the values of each key 0 ... count-1; nan for a key without values."""
    out = np.full(count, np.nan)
    if not len(values):
        return out
    order = np.lexsort((values, key))
    sorted_key = key[order]
    starts = np.searchsorted(sorted_key, np.arange(count + 1))
    size = np.diff(starts)
    have = size > 0
    middle = starts[:-1] + np.maximum(size - 1, 0) // 2
    out[have] = values[order][middle[have]]
    return out


def ahead_by_host(table: Table, offset: Column) -> dict[int, int]:
    """Returns by how many nanoseconds the clock of each rank's host is ahead of the typical clock.

    Ranks of a host have one clock, and what `offsets` tells apart there is chance: their median counts.
    Empty if all ranks are on one host, or nothing is known.
    """
    hosts: dict[str, list[int]] = {}
    for source in table.sources:
        if 0 <= source.rank < len(offset) and not np.isnan(offset[source.rank]):
            hosts.setdefault(source.host, []).append(source.rank)
    if len(hosts) < 2:
        return {}
    return {r: int(np.median(offset[ranks])) for ranks in hosts.values() for r in ranks}


def offsets(table: Table, rows: Column, cell: Column) -> Column:
    """Returns each rank's clock minus the typical clock, in nanoseconds (float64, by rank; nan if unknown).

    Ranks complete a collective at about the same time, so their completion times differ by the offsets of
    their clocks. Members of two groups connect these groups; a few rounds carry the offsets from group to
    group.
    """
    count = int(table.ranks.max()) + 1 if len(table.ranks) else 0
    offset = np.zeros(count)
    if not len(rows):
        return np.full(count, np.nan)
    step = max(1, len(rows) // 1_000_000)
    if step > 1:  # keep whole collectives, evenly spread
        rows, cell = rows[cell % step == 0], cell[cell % step == 0]
    rank = table.rank[rows]
    ended = (table.completed_ns[rows] - int(table.completed_ns[rows[0]])).astype(np.float64)
    cells = int(cell.max()) + 1
    for _ in range(_ROUNDS):
        typical = grouped_median(ended - offset[rank], cell, cells)
        fresh = grouped_median(ended - typical[cell], rank, count)
        known = ~np.isnan(fresh)
        moved = float(np.abs(offset[known] - fresh[known]).max()) if known.any() else 0.0
        offset = np.where(known, fresh, 0.0)
        if moved < 1000.0:
            break
    return np.where(known, offset, np.nan)
