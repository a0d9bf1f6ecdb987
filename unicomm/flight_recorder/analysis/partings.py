"""Findings moved to where the ranks made different calls, if that is earlier than where it shows."""

from __future__ import annotations

from collections.abc import Sequence

from unicomm.flight_recorder.table.rows import at_place, find_row, place
from unicomm.flight_recorder.table.table import Table

from .call_mismatches import CallMismatches
from .call_sites import CallSites, Parting
from .verdict import Edge, Finding, Verdict

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
            if at < _MOST and finding.verdict in (Verdict.UNMATCHED_P2P, Verdict.WAIT_CYCLE):
                _name_lone_message(table, calls.sites, finding, groups)
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


def _name_lone_message(table: Table, sites: CallSites, finding: Finding, groups: dict[str, int]) -> None:
    """Changes a finding about a message without its other side to the line whose messages have none."""
    for edge in finding.edges:
        if not edge.p2p or edge.group not in groups or len(edge.waits_for) != 1:
            continue
        rank, peer, send = edge.rank, edge.waits_for[0], edge.operation.startswith("send")
        row = sites.lone_message(groups[edge.group], rank, peer, send)
        if row is None:
            continue
        other, to = ("receive", "to") if send else ("send", "from")
        if place(table, row) != edge.where:
            finding.evidence.append(f"it shows later: {finding.sentence}")
        finding.sentence = (
            f"Rank {rank} issues {table.describe(row)} {to} rank {peer}{at_place(table, row)}, but"
        )
        finding.sentence += f" rank {peer} has no {other} for the messages of that line, only for the others."
        finding.verdict, finding.culprits = Verdict.UNMATCHED_P2P, [rank]
        finding.victims = sorted({*finding.victims, peer} - {rank})
        finding.group, finding.seq_num, finding.operation = (
            edge.group,
            int(table.seq[row]),
            table.op_name(row),
        )
        finding.next_steps = [
            f"look at {place(table, row)}: rank {peer} needs a {other} for it, or it is one too many"
        ]
        seq = int(table.seq[row])
        lone = Edge(rank, [peer], edge.group, table.describe(row), seq, place(table, row), True)
        finding.edges = [lone, *finding.edges]
        return
