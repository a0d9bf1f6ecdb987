"""Operations that a dump calls over, though they cannot have succeeded.

torch's Gloo marks an operation that failed, say at its timeout, like one that succeeded: as retired. But an
operation in which each rank needs the data of all others succeeds only if all have issued it.
"""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.ring.reader import UNKNOWN_ERROR, State

from .table import Table

_NEED_ALL = ("all_", "reduce_scatter", "barrier")  # how the names of these operations begin


def mark_failed(table: Table) -> None:
    """Lets retired operations count as failed if a member whose dump is whole has not issued them."""
    unsure = [source for source in table.sources if source.retired_only]
    if not unsure:
        return
    needs_all = np.asarray([op.startswith(_NEED_ALL) for op in table.ops], np.bool_)[table.calls.op]
    for group in sorted({group for source in unsure for group in source.created}):
        if group < 0:
            continue
        members = [table.source_of.get(rank) for rank in table.groups[group].ranks.tolist()]
        issued = [s.created.get(group, 0) for s in members if s and (group in s.created or not s.wrapped)]
        last = min(issued, default=0)  # the last one that all known members have issued
        for source in unsure:
            if source.created.get(group, 0) <= last:
                continue
            span = slice(source.begin, source.end)
            over = (table.group[span] == group) & (table.seq[span] > last) & needs_all[table.call[span]]
            over &= (table.state[span] == State.COMPLETED) & (table.completed_ns[span] == 0)
            if over.any():
                table.state[span][over] = State.FAILED
                table.error[span][over] = UNKNOWN_ERROR
                source.completed[group] = min(last, source.completed.get(group, last))
