"""Single rows of a table: found, and described as text."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.call_path import user_frame

from .table import Table


def find_row(table: Table, rank: int, group: int, seq: int) -> int | None:
    """Returns the row of collective `seq` of a group on a rank, or None."""
    source = table.source_of.get(rank)
    if source is None:
        return None
    span = slice(source.begin, source.end)
    hit = np.flatnonzero((table.seq[span] == seq) & (table.group[span] == group))
    for row in (hit + source.begin).tolist():
        if table.calls.kind[table.call[row]] == OpKind.COLLECTIVE:
            return int(row)
    return None


def last_row(table: Table, rank: int, group: int | None = None) -> int | None:
    """Returns the last row of a rank, or of a rank in a group; None if there is no row."""
    source = table.source_of.get(rank)
    if source is None or source.end == source.begin:
        return None
    if group is None:
        return source.end - 1
    hit = np.flatnonzero(table.group[source.begin : source.end] == group)
    return int(hit[-1]) + source.begin if len(hit) else None


def place(table: Table, row: int) -> str:
    """Returns file:line of the user's call, "" if it is unknown."""
    frame = user_frame(table.stack(row))
    return str(frame) if frame and frame.file else ""


def at_place(table: Table, row: int) -> str:
    """Returns " at file:line" of the user's call, "" if it is unknown."""
    where = place(table, row)
    return f" at {where}" if where else ""


def op_text(table: Table, row: int) -> str:
    """Returns operation, number and group: "all_reduce #5 of 'tp'"."""
    group = int(table.group[row])
    name = table.groups[group].name if group >= 0 else "?"
    return f"{table.op_name(row)} #{int(table.seq[row])} of '{name}'"
