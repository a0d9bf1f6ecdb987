"""The judgement: the end of a play as a table, as if the ranks had really hung there, for the analyzer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.matching import messages, unfit_parts
from unicomm.flight_recorder.analysis.verdict import Finding, Report, Verdict
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import InputRemark, State
from unicomm.flight_recorder.table.table import Column, Source, Table

from .details import Details
from .groups import calls_of_some, never_made
from .play import Played, Plays, Rules, hanging_schedule
from .recorded_table import add_details


class Judgement(NamedTuple):
    """The report, the table that it is about, and what was played. `played` has the rows of `recorded`."""

    report: Report
    table: Table
    played: Played


def judge(recorded: Table, rules: Rules, details: Mapping[int, Details] | None = None) -> Judgement:
    """Plays the recorded operations and has the analyzer explain how they end.

    `details`: by rank, what rings do not hold.
    """
    details = details or {}
    tags = add_details(recorded, details)
    read_values = any("depends on received data" in remark.message for remark in recorded.remarks)
    not_compared = read_values and bool(unfit_parts(recorded))
    if read_values:
        recorded.parts.clear()
    plays = Plays(recorded, rules, tags)
    search = hanging_schedule(plays)
    table = played_table(recorded, plays, search.played)
    report = analyze(table, program=recorded)
    if read_values:
        kept = [f for f in report.findings if f.verdict is not Verdict.SPLIT_MISMATCH]
        not_compared = not_compared or len(kept) < len(report.findings)
        report.findings = kept or [_good(table)]
    if not_compared:
        text = "parts of uneven exchanges come from received data and were not compared"
        report.remarks.append(InputRemark("", text))
    if not any(finding.cause for finding in report.findings):
        faults = [finding for finding in report.findings if finding.verdict is not Verdict.GOOD]
        made = never_made(recorded, details)
        report.findings = [*made, *faults, *([] if made else calls_of_some(details))] or report.findings
    report.remarks.append(InputRemark("", _proof(rules, search.plays, search.exhausted, report.good)))
    return Judgement(report, table, search.played)


def _good(table: Table) -> Finding:
    sentence = (
        f"All good: {len(table)} operations fit together, as far as they do not depend on received data."
    )
    return Finding(Verdict.GOOD, confidence=0.6, sentence=sentence)


def _proof(rules: Rules, plays: int, exhausted: bool, good: bool) -> str:
    sends = "a send waits for its receive" if not rules.buffered else "sends are buffered"
    order = "messages of a group run in order" if rules.messages_in_order else "messages run side by side"
    rules_text = f"rules: {sends}; {order}"
    if not exhausted:
        return f"{rules_text}; {plays} schedules were played, and there are more"
    if not good:
        return (
            f"{rules_text}; the schedule shown has the fewest choices of those that end so ({plays} played)"
        )
    if plays == 1:
        return f"{rules_text}; all schedules end alike under them, so none hangs"
    return f"{rules_text}; all {plays} schedules that differ were played, and none hangs"


def played_table(recorded: Table, plays: Plays, played: Played) -> Table:
    """Returns the table of what the ranks have done when nothing goes on."""
    created = np.asarray(played.created, np.int64)
    started = np.asarray(played.started, np.int64)
    completed = np.asarray(played.completed, np.int64)
    peer, seq = recorded.peer.copy(), recorded.seq.copy()
    for recv, send in played.chosen:
        peer[recv] = plays.rank[send]
    if plays.rules.buffered:
        completed[_without_receive(plays, played, peer)] = 0
    keep = created > 0
    state = np.where(completed > 0, State.COMPLETED, np.where(started > 0, State.STARTED, State.CREATED))
    index = np.flatnonzero(keep)
    columns = {
        name: getattr(recorded, name)[index]
        for name in ("rank", "group", "call", "error", "flags", "frame", "thread")
    }
    any_rank = bool((recorded.peer[(recorded.kind == OpKind.RECV)] < 0).any())
    at, sources = 0, []
    for source in recorded.sources:
        n = int(keep[source.begin : source.end].sum())
        rows = range(source.begin, source.begin + n)
        whole = n == source.end - source.begin
        sources.append(_played_source(recorded, source, rows, at, state, whole))
        sources[-1].exact_p2p = not any_rank
        at += n
    return replace(
        recorded,
        **columns,
        peer=peer[index],
        seq=seq[index],
        state=state[index].astype(np.uint8),
        created_ns=created[index],
        started_ns=started[index],
        completed_ns=completed[index],
        sources=sources,
        remarks=list(recorded.remarks),
        parts={new: recorded.parts[row] for new, row in enumerate(index.tolist()) if row in recorded.parts},
        coming=_coming(recorded, keep),
    )


def _coming(recorded: Table, keep: Column) -> frozenset[int]:
    """Returns the played messages whose other side was not issued, but would be, by their new rows."""
    found = messages(recorded)
    lost = (found.partner >= 0) & keep[found.rows] & ~keep[found.partner]
    new = np.cumsum(keep) - 1
    return frozenset(new[found.rows[lost]].tolist())


def _without_receive(plays: Plays, played: Played, peer: Column) -> list[int]:
    """Returns the issued sends, beyond the number of receives of their channel."""
    received: dict[tuple[int, int, int], int] = {}
    rows = [row for row in range(len(plays.rank)) if plays.message[row] and played.created[row]]
    for row in rows:
        if not plays.send[row]:
            key = (plays.group[row], int(peer[row]), plays.rank[row])
            received[key] = received.get(key, 0) + 1
    lost = []
    for row in rows:
        if plays.send[row] and plays.peer[row] in plays.present:
            key = (plays.group[row], plays.rank[row], plays.peer[row])
            received[key] = received.get(key, 0) - 1
            if received[key] < 0:
                lost.append(row)
    return lost


def _played_source(
    table: Table,
    source: Source,
    rows: range,
    at: int,
    state: Column,
    whole: bool,
) -> Source:
    """Returns the source of the first rows of a rank, which begin at `at` in the new table."""
    first: dict[int, int] = {}
    created = dict.fromkeys(source.members, 0)
    started, completed = dict(created), dict(created)
    collective = table.kind[rows.start : rows.stop] == OpKind.COLLECTIVE
    for i, row in enumerate(rows):
        if collective[i]:
            group, seq = int(table.group[row]), int(table.seq[row])
            first.setdefault(group, seq)
            created[group] = seq
            if state[row] >= State.STARTED:
                started[group] = seq
            if state[row] == State.COMPLETED:
                completed[group] = seq
    return replace(
        source,
        begin=at,
        end=at + len(rows),
        first_seq=first,
        created=created,
        started=started,
        completed=completed,
        closed=set(source.closed) if whole else set(),
        as_of_ns=0,
    )
