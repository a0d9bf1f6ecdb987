"""The call paths behind a finding: how the ranks that it names came to their operations."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.table.rows import last_row, op_text
from unicomm.flight_recorder.table.table import Table

from .verdict import CalledFrom, Finding, PathLine

_MOST_PATHS = 4
_MOST_RANKS = 2  # of the culprits, and of the victims


def call_paths(table: Table, found: Finding) -> list[CalledFrom]:
    """Returns the call paths of a finding's ranks, the culprits' first; ranks with equal paths share one."""
    ranks = [*found.culprits[:_MOST_RANKS], *(side.ranks[0] for side in found.sides if side.ranks)]
    ranks += [*(edge.rank for edge in found.edges[:_MOST_PATHS]), *found.victims[:_MOST_RANKS]]
    out: dict[tuple[int, str], CalledFrom] = {}
    for rank in dict.fromkeys(ranks):
        row = _row(table, found, rank)
        if row is None or not table.stack(row) or len(out) == _MOST_PATHS:
            continue
        lines = [PathLine(f.file, f.line, f.function, f.library) for f in table.stack(row)]
        what = op_text(table, row)
        out.setdefault((int(table.frame[row]), what), CalledFrom([], what, lines)).ranks.append(rank)
    return list(out.values())


def _row(table: Table, found: Finding, rank: int) -> int | None:
    """Returns the row of the finding's operation on a rank, else the rank's last row."""
    source = table.source_of.get(rank)
    if source is None:
        return None
    if found.seq_num >= 0:
        rows = np.flatnonzero(table.seq[source.begin : source.end] == found.seq_num) + source.begin
        for row in reversed(rows.tolist()):
            group = int(table.group[row])
            if group >= 0 and table.groups[group].name == found.group:
                return int(row)
    return last_row(table, rank)
