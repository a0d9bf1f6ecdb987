"""Findings moved to where the ranks made different calls, if that is earlier than where it shows."""

from __future__ import annotations

from collections.abc import Sequence

from unicomm.flight_recorder.table.rows import find_row
from unicomm.flight_recorder.table.table import Table

from .call_mismatches import CallMismatches
from .call_sites import Parting
from .verdict import Finding, Verdict

#: Findings that may be the consequence of an earlier call that a rank made alone.
_MAY_FOLLOW = frozenset(
    {
        Verdict.WRONG_OPERATION,
        Verdict.SIZE_MISMATCH,
        Verdict.DTYPE_MISMATCH,
        Verdict.ROOT_MISMATCH,
        Verdict.REDUCTION_MISMATCH,
        Verdict.SPLIT_MISMATCH,
        Verdict.ORDER_SWAP,
        Verdict.NEVER_JOINED,
        Verdict.WAIT_CYCLE,
    }
)
_MOST = 16  # findings that are looked at


def at_partings(table: Table, calls: CallMismatches, findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings; one that follows from an earlier different call is replaced by that."""
    groups = {group.name: index for index, group in enumerate(table.groups)}
    out: list[Finding] = []
    known: set[tuple[int, int]] = set()
    for at, finding in enumerate(findings):
        parted = None
        if at < _MOST and finding.verdict in _MAY_FOLLOW:
            parted = _earliest(table, calls, finding, groups)
        if parted is None:
            out.append(finding)
            continue
        group, parting = parted
        if (group, parting.seq) not in known:
            known.add((group, parting.seq))
            out.append(calls.parted(group, parting, finding))
    return out


def _earliest(
    table: Table, calls: CallMismatches, finding: Finding, groups: dict[str, int]
) -> tuple[int, Parting] | None:
    """Returns the group and the place in it where ranks parted ways first, before a finding shows it."""
    shown = {(finding.group, finding.seq_num)}
    shown |= {(edge.group, edge.seq_num) for edge in finding.edges if not edge.p2p}
    found = []
    for name, seq in sorted(shown):
        if name not in groups or seq < 1:
            continue
        group = groups[name]
        parting = calls.sites.parting(group, seq)
        if parting is None:
            continue
        rows = [find_row(table, rank, group, parting.seq) for rank in (*parting.right, *parting.wrong)]
        if None in rows:
            continue  # it is not in the table any more, or was never reached
        found.append((min(int(table.created_ns[row]) for row in rows if row is not None), group, parting))
    if not found:
        return None
    _, group, parting = min(found, key=lambda one: one[0])
    same = (group, parting.seq) == (groups.get(finding.group), finding.seq_num)
    if same and finding.verdict in (Verdict.WRONG_OPERATION, Verdict.ORDER_SWAP):
        return None  # it says so itself
    return group, parting
