"""analyze: from a table to a report with verdicts, culprits, victims and stragglers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from unicomm.flight_recorder.ring.reader import InputRemark
from unicomm.flight_recorder.table import clocks
from unicomm.flight_recorder.table.collectives import CollectiveIndex
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital, ranks_text, span

from . import stragglers
from .blocking_ranks import BlockingRanks, health
from .call_mismatches import CallMismatches, Mismatch
from .call_paths import call_paths
from .call_sites import CallSites
from .matching import call_signatures, divergences, messages, mismatched_messages, uneven_exchanges
from .own_faults import add_places, own_faults, without_absences
from .partings import at_partings
from .silent_corruption import corrupted
from .size_mismatches import SizeMismatches
from .verdict import Finding, Report, Verdict
from .wait_graph import WaitGraph, WaitNode, build_wait_graph, pending_rows

STUCK_AFTER = 2.0  # seconds
Progress = Callable[[str], None]

# The order of findings: the greater weight first; of equal weights, more victims first.
_WEIGHT = {
    Verdict.WRONG_OPERATION: 95,  # of ranks that parted ways earlier than a mismatch shows
    Verdict.PROCESS_DEAD: 90,
    Verdict.PROCESS_STOPPED: 88,
    Verdict.MEMBERSHIP: 85,
    Verdict.ORDER_SWAP: 80,
    Verdict.WAIT_CYCLE: 78,
    Verdict.UNMATCHED_P2P: 76,
    Verdict.NEVER_JOINED: 74,
    Verdict.BLOCKED_OUTSIDE: 74,
    Verdict.NEVER_FINISHED: 50,
    Verdict.NOT_READ: 40,
    Verdict.SLOW: 30,
    Verdict.WRAPPED: 10,
}
_OF_PROCESSES = (Verdict.PROCESS_DEAD, Verdict.PROCESS_STOPPED)
_CORRUPTION, _OWN_FAULT, _STUCK_MISMATCH, _SILENT_MISMATCH = 98, 97, 95, 60
_MOST_WITH_PATHS = 16  # findings


def analyze(
    table: Table,
    stuck_after: float = STUCK_AFTER,
    progress: Progress | None = None,
    program: Table | None = None,
) -> Report:
    """Analyzes a table.

    Args:
        stuck_after: the seconds after which an unfinished operation of a running process counts as stuck. In
            dumps, and in rings of ended processes, every unfinished operation is stuck.
        progress: called with the name of each step.
        program: all operations that the ranks would issue, if that is known, as in a rehearsal.
    """
    tell = progress or (lambda _: None)
    stuck_ns = int(stuck_after * 1e9)
    tell("comparing collectives")
    signatures, cells = call_signatures(table), CollectiveIndex(table)
    calls = CallMismatches(table, signatures, CallSites(table, signatures, program))
    mismatches = calls.collectives(divergences(table, signatures, cells))
    sizes = SizeMismatches(table)
    mismatched = {(j.group, j.seq) for j in mismatches}
    mismatches += [
        j for j in sizes.exchanges(uneven_exchanges(table, cells)) if (j.group, j.seq) not in mismatched
    ]
    tell("matching messages")
    found = messages(table)
    mismatches += sizes.messages(found, mismatched_messages(table, found))
    mismatches += corrupted(table, found)
    tell("comparing clocks")
    rows, cell = clocks.sample(table, cells)
    offsets = clocks.offsets(table, rows, cell)
    late = stragglers.lateness(table, rows, cell, offsets)
    slow = {r: float(late.late_ns[r]) for r in late.slow()} if late else {}
    tell("following who waits for whom")
    state = health(table)
    pending, lasting = pending_rows(table, stuck_ns, bool(state.gone))
    waits = build_wait_graph(table, found, pending, state.gone)
    explained = _explained(waits, mismatches)
    findings = BlockingRanks(table, waits, state, explained, slow, stuck_ns).findings()
    findings = [f for f in findings if f.verdict in _OF_PROCESSES or lasting & {*f.culprits, *f.victims}]
    _doubt_the_dead(table, findings)
    findings = [*_with_victims(waits, mismatches), *_not_explained(findings, mismatches), *_membership(table)]
    tell("comparing lines")
    weight = {id(j.finding): _weight_of(j) for j in mismatches}
    findings.sort(key=lambda f: -weight.get(id(f), _WEIGHT.get(f.verdict, 0)))
    findings = at_partings(table, calls, findings)
    if slow and late and not any(set(slow) & set(f.culprits) for f in findings):
        findings.append(_slow(slow, late, bool(findings)))
    own = own_faults(table, clocks.ahead_by_host(table, offsets))
    findings = [*own, *without_absences(findings, own)]
    add_places(table, findings)
    weight |= {id(f): _OWN_FAULT for f in own}
    first = {id(f): at for at, f in enumerate(own)}  # own faults in the order of their times
    findings.sort(
        key=lambda f: (
            -weight.get(id(f), _WEIGHT.get(f.verdict, 0)),
            first.get(id(f), 0),
            -len(f.victims),
            f.since_ns,
        )
    )
    for finding in findings[:_MOST_WITH_PATHS]:
        finding.call_paths = call_paths(table, finding)
    missing = [r for r in table.ranks.tolist() if r not in table.source_of]
    report = Report(
        findings=findings or [_good(table)],
        stragglers=stragglers.scores(table, late, rows, cell) if late else [],
        remarks=list(table.remarks),
        ranks=len(table.ranks),
        present=len(table.source_of),
        missing=missing,
        not_read=sorted(table.not_read),
        entries=len(table),
        groups=len(table.groups),
        clock_offsets_ns={r: int(offsets[r]) for r in table.source_of if offsets[r] == offsets[r]},
        formats=dict(Counter(s.format for s in table.sources)),
    )
    if missing:
        report.remarks.append(InputRemark("", f"no file of {ranks_text(missing)}"))
    if report.not_read:
        what = "nothing of them or of their hosts was read, so they are unknown, not dead"
        report.remarks.append(InputRemark("", f"not-read: {ranks_text(report.not_read)}: {what}"))
    return report


def _weight_of(one: Mismatch) -> int:
    if (
        one.finding.verdict is Verdict.SILENT_CORRUPTION
    ):  # whatever a rank does with wrong data follows from it
        return _CORRUPTION
    return _STUCK_MISMATCH if one.derails else _SILENT_MISMATCH


def _doubt_the_dead(table: Table, findings: list[Finding]) -> None:
    """Lowers the confidence in dead ranks if other hosts were not read.

    A launcher ends the ranks of its host when a rank of another host has failed.
    """
    for one in findings:
        if one.verdict is Verdict.PROCESS_DEAD and table.not_read:
            one.confidence = min(one.confidence, 0.6)
            who = ranks_text(sorted(table.not_read))
            one.evidence.append(f"{who} were not read: if one of them failed first, this is a consequence")
            one.next_steps.append(f"read the hosts of {who}, too")


def _explained(waits: WaitGraph, mismatches: list[Mismatch]) -> list[WaitNode]:
    """Returns the stuck collectives and ranks that a mismatch explains."""
    first: dict[int, int] = {}
    for one in mismatches:
        if one.derails and one.seq >= 0:
            first[one.group] = min(one.seq, first.get(one.group, one.seq))
    nodes: list[WaitNode] = [n for n in waits.stuck if n[0] in first and n[1] >= first[n[0]]]
    for one in mismatches:
        if one.derails and one.seq < 0:  # a message: both sides are stuck
            nodes += [(rank,) for rank in (*one.finding.culprits, *one.finding.victims)]
    return nodes


def _with_victims(waits: WaitGraph, mismatches: list[Mismatch]) -> list[Finding]:
    for one in mismatches:
        nodes: list[WaitNode] = [n for n in waits.stuck if n[0] == one.group and n[1] >= one.seq >= 0]
        if one.seq < 0:
            nodes += [(rank,) for rank in (*one.finding.culprits, *one.finding.victims)]
        if one.derails and nodes:
            more = waits.victims(nodes, one.finding.culprits)
            one.finding.victims = sorted({*one.finding.victims, *more})
    return [one.finding for one in mismatches]


def _not_explained(findings: list[Finding], mismatches: list[Mismatch]) -> list[Finding]:
    """Drops findings of unfinished messages whose size mismatch is a finding already."""
    wrong = {
        (j.finding.group, *sorted((*j.finding.culprits, *j.finding.victims))) for j in mismatches if j.seq < 0
    }
    return [
        f
        for f in findings
        if f.verdict is not Verdict.NEVER_FINISHED
        or (f.group, *sorted((*f.culprits, *f.victims))) not in wrong
    ]


def _membership(table: Table) -> list[Finding]:
    """Returns findings about groups for which the sources list different members. The minority is wrong."""
    differing: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for source in table.sources:
        for index, ranks in source.members.items():
            if ranks is not None:
                theirs = differing.setdefault(index, {})
                theirs.setdefault(tuple(int(r) for r in ranks), []).append(source.rank)
    out = []
    for index, versions in differing.items():
        group = table.groups[index]
        agree = [s.rank for s in table.sources if index in s.members and s.members[index] is None]
        culprits = sorted(r for ranks in versions.values() for r in ranks)
        tied = len(agree) <= max(len(r) for r in versions.values())
        lines = [f"{ranks_text(agree)}: the members are {ranks_text(group.ranks.tolist())}"]
        lines += [f"{ranks_text(r)}: the members are {ranks_text(m)}" for m, r in versions.items()]
        who = ranks_text(culprits)
        verb = "have" if len(culprits) > 1 else "has"
        out.append(
            Finding(
                Verdict.MEMBERSHIP,
                sorted({*culprits, *agree}) if tied else culprits,
                sorted(set(agree) - set(culprits)) if not tied else [],
                group.name,
                -1,
                "",
                0.5 if tied else 0.95,
                f"{capital(who)} {verb} other members in '{group.name}' than {ranks_text(agree)}.",
                lines,
                next_steps=[f"compare how {who} and the others compute the list of ranks for '{group.name}'"],
            )
        )
    return out


def _slow(slow: dict[int, float], late: stragglers.Lateness, besides: bool) -> Finding:
    ranks = sorted(slow)
    worst = max(slow, key=lambda r: slow[r])
    share = float(late.lost_ns[ranks].sum()) / max(late.span_ns, 1.0)
    who = ranks_text(ranks)
    verb = "are" if len(ranks) > 1 else "is"
    return Finding(
        Verdict.SLOW,
        ranks,
        [int(r) for r in (late.count > 0).nonzero()[0] if int(r) not in slow],
        confidence=late.confidence(np.asarray(ranks)),
        sentence=("" if besides else "Nothing is stuck, but ")
        + f"{capital(who) if besides else who} {verb} repeatedly late to collectives,"
        f" typically by {span(slow[worst])}; the others spend {min(share, 1.0):.0%} of the time waiting.",
        evidence=[
            f"rank {r}: last in {late.last[r]:.0%} of {int(late.count[r])} collectives,"
            f" {span(slow[r])} after the typical rank, {span(late.gap_ns[r])} between operations"
            for r in sorted(slow, key=lambda r: -slow[r])[:5]
        ]
        + [
            f"lateness counts from {span(late.least_ns)} here: arrivals differ by {span(late.spread_ns)}"
            f" otherwise, and an operation begins every {span(late.step_ns)}"
        ],
        next_steps=[f"profile {who}: data loading, garbage collection, a slow or throttled device"],
    )


def _good(table: Table) -> Finding:
    n = len(table.source_of)
    complete = n == len(table.ranks)
    said = f"All good: {len(table)} operations of {n} rank{'s' if n != 1 else ''} fit together"
    said += (
        ", and none is stuck."
        if complete
        else f", as far as the files of {n} of {len(table.ranks)} ranks tell."
    )
    return Finding(Verdict.GOOD, confidence=0.95 if complete else 0.6, sentence=said)
