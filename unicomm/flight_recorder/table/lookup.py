"""Finding single rows of a table."""

from __future__ import annotations

import numpy as np

from .columns import Kind, Table


def find_row(table: Table, rank: int, group: int, seq: int) -> int | None:
    """The row of a rank's collective, or None."""
    source = table.source_of.get(rank)
    if source is None:
        return None
    span = slice(source.begin, source.end)
    hit = np.flatnonzero((table.seq[span] == seq) & (table.group[span] == group))
    for row in (hit + source.begin).tolist():
        if table.calls.kind[table.call[row]] == Kind.COLLECTIVE:
            return int(row)
    return None


def last_row(table: Table, rank: int, group: int | None = None) -> int | None:
    """The last row of a rank, or of a rank in a group; None where it has none."""
    source = table.source_of.get(rank)
    if source is None or source.end == source.begin:
        return None
    if group is None:
        return source.end - 1
    hit = np.flatnonzero(table.group[source.begin : source.end] == group)
    return int(hit[-1]) + source.begin if len(hit) else None
