"""A report as one HTML file without external resources: verdicts, evidence, timeline, wait-for graph.

The frame and the look are those of all pages: flight_recorder/pages. timeline.js draws the timeline.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Edge, Finding, Report, Side, Straggler, Verdict
from unicomm.flight_recorder.pages.elements import (
    Cell,
    Column,
    Html,
    Row,
    bar,
    card,
    chips,
    element,
    facts,
    finding,
    grid,
    items,
    join,
    legend,
    place,
    verdict,
    visible,
)
from unicomm.flight_recorder.pages.page import page as whole_page
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.rows import place as call_place
from unicomm.flight_recorder.table.table import Table
from unicomm.flight_recorder.texts import capital, ranks_text, span

from . import timeline
from .timeline_data import chosen_ranks, most_per_rank, timeline_data
from .wait_graph_svg import draw

_MOST_SIDES, _MOST_EDGES, _MOST_OTHERS, _MOST_INPUT, _MOST_LATE = 12, 40, 30, 50, 12
_TONE = {Verdict.GOOD: "good", Verdict.SLOW: "warn", Verdict.WRAPPED: "warn", Verdict.NOT_READ: "warn"}
_SPENT = (
    ("gap", "between operations"),
    ("waiting", "waiting for the last rank"),
    ("transfer", "transfer"),
)


def write(report: Report, table: Table, path: Path | str) -> Path:
    """Writes the page. Raises `OSError` when the file cannot be written."""
    target = Path(path)
    target.write_text(page(report, table), encoding="utf-8")
    return target


def page(report: Report, table: Table) -> str:
    """Returns the text of the page."""
    main = report.main
    named = f": {ranks_text(main.culprits)}" if main.culprits else ""
    body = [
        _verdict(main),
        *_others(report.findings[1:]),
        *_advice(main),
        _sides(main.sides),
        card("Call paths", *paths) if (paths := _call_paths(main)) else "",
        _timeline_section(report, table),
        _waits(main, table),
        _stragglers(report.stragglers if report.late else []),
        _input(report),
    ]
    script = Path(__file__).with_name("timeline.js")
    drawn = bool(len(table))
    return whole_page(
        "trace",
        main.verdict.value + named,
        _facts(report),
        filter(None, body),
        [script] if drawn else [],
        timeline_data(report, table, _culprits(report)) if drawn else None,
    )


def _facts(report: Report) -> list[str]:
    formats = ", ".join(f"{n} x {name}" for name, n in report.formats.items())
    return [
        f"{report.present} of {report.ranks} ranks" if report.missing else _count(report.ranks, "rank"),
        f"{len(report.not_read)} not read" if report.not_read else "",
        _count(report.entries, "operation"),
        _count(report.groups, "communicator"),
        formats,
    ]


def _culprits(report: Report) -> set[int]:
    """Returns the culprits of the faults, without those of mere advice."""
    grave = [found for found in report.findings if _TONE.get(found.verdict, "bad") == "bad"]
    return {rank for found in (report.main, *grave) for rank in found.culprits}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _name(found: Finding) -> str:
    return capital(found.verdict.value.replace("-", " "))


def _verdict(found: Finding) -> Html:
    tone = _TONE.get(found.verdict, "bad")
    told = [*_named(found), *_place_of(found)]
    if found.operation:
        number = f" #{found.seq_num}" if found.seq_num >= 0 else ""
        told.append(("operation", element("code", found.operation + number)))
    if found.group:
        told.append(("communicator", element("code", found.group)))
    below = [facts(told)] if told else []
    return verdict(tone, _name(found), found.sentence, *below, confidence=found.confidence)


def _named(found: Finding) -> list[tuple[str, str]]:
    """Returns the culprits and the victims of a finding, where there are any."""
    out: list[tuple[str, str]] = []
    for noun, ranks, tone in (("culprit", found.culprits, "bad"), ("victim", found.victims, "warn")):
        if ranks:
            out.append((noun + ("s" if len(ranks) > 1 else ""), chips(ranks, tone)))
    return out


def _place_of(found: Finding) -> list[tuple[str, str]]:
    """Returns how the first culprit ended, and where in the program it was."""
    cause = found.cause
    if cause is None:
        return []
    raised = f"{cause.exception}: {cause.message}" if cause.message else cause.exception
    where = f"{cause.file}:{cause.line}" if cause.file else ""
    inside = f"{where} {cause.function}".rstrip() if where else ""
    told: list[tuple[str, str]] = [
        ("exception", element("code", raised) if raised else ""),
        ("signal", cause.signal),
        ("exit code", "" if cause.exit_code is None else str(cause.exit_code)),
        ("in the program at", place(inside, cause.call_path) if inside else ""),
    ]
    return [(name, value) for name, value in told if value]


def _call_paths(found: Finding) -> list[Html]:
    """Returns the user's line of each call path to an operation, under which the path is folded."""
    out = []
    for called in found.call_paths:
        lines = [
            f"{line.file}:{line.line} {line.function}" + (f" ({line.library})" if line.library else "")
            for line in called.path
        ]
        if lines:
            who = f"{capital(ranks_text(called.ranks, 40))} came to {called.operation} from"
            out.append(element("div", element("small", who), place(lines[called.user], lines)))
    return out


def _advice(found: Finding) -> list[str]:
    """Returns the next steps and the evidence of the main finding, beside each other."""
    out = [
        (title, items(lines, kind))
        for title, lines, kind in (
            ("What to do now", found.next_steps, "ol"),
            ("Evidence", found.evidence, "ul"),
        )
        if lines
    ]
    style = "half" if len(out) > 1 else "half alone"
    return [card(title, content, class_=style) for title, content in out]


def _sides(sides: list[Side]) -> str:
    return card("Who did what", _sides_table(sides)) if sides else ""


def _sides_table(sides: list[Side]) -> Html:
    rows = []
    for i, side in enumerate(sides[:_MOST_SIDES]):
        who = "majority" if i == 0 and len(sides) > 1 else "differs" if len(sides) > 1 else ""
        rows.append(
            element(
                "tr",
                element("th", capital(ranks_text(side.ranks, 40)), element("small", who), scope="row"),
                element("td", element("code", side.what), element("small", side.where)),
                class_="bad" if i else None,
            )
        )
    made = element("table", element("tbody", *rows), class_="sides")
    return join(made, _more(len(sides) - _MOST_SIDES))


def _more(count: int) -> str:
    return element("p", f"and {count} more; --json has all", class_="note") if count > 0 else ""


def _waits(found: Finding, table: Table) -> str:
    if not found.edges:
        return ""
    waiting = _waiting(found, table)
    shown = {rank for edge in found.edges for rank in (edge.rank, *edge.waits_for)} | set(waiting)
    rest = len(set(found.victims) - shown)
    behind = f"{_count(rest, 'more rank')} wait{'s' * (rest == 1)} behind these." if rest else ""
    note = element("p", behind, class_="note") if rest else ""
    graph = element("div", draw(found, waiting), _edges(found), class_="graph")
    return card(_title_of_waits(found), graph, note)


def _waiting(found: Finding, table: Table) -> dict[int, tuple[str, str]]:
    """Returns what each victim in the operation of a finding has called, and at which file:line."""
    rows = np.flatnonzero(table.state != State.COMPLETED)
    rows = rows[timeline.of_finding(found, table, rows)]
    victims = set(found.victims)
    called = ((int(table.rank[row]), row) for row in rows.tolist())
    return {rank: (table.op_name(row), call_place(table, row)) for rank, row in called if rank in victims}


def _title_of_waits(found: Finding) -> str:
    return "The wait cycle" if found.verdict is Verdict.WAIT_CYCLE else "Who waits for whom"


def _edges(found: Finding) -> Html:
    lines = [_edge(edge) for edge in found.edges[:_MOST_EDGES]]
    first, rest = (lines[:4], lines[4:]) if len(lines) > 5 else (lines, [])
    shown = [element("ul", *first, class_="edges")]
    if rest:
        more = _more(len(found.edges) - _MOST_EDGES)
        folded = element("ul", *rest, class_="edges")
        shown.append(element("details", element("summary", f"{len(rest)} more"), folded, more))
    return element("div", *shown)


def _edge(edge: Edge) -> Html:
    number = f" #{edge.seq_num}" if edge.seq_num >= 0 else ""
    return element(
        "li",
        element("b", f"rank {edge.rank}"),
        " waits for ",
        element("b", ranks_text(edge.waits_for, 30)),
        " in ",
        element("code", edge.operation + number),
        " of ",
        element("code", edge.group),
        element("small", edge.where) if edge.where else "",
    )


def _stragglers(stragglers: list[Straggler]) -> str:
    if not stragglers:
        return ""
    shown = stragglers[:_MOST_LATE]
    longest = max(s.waiting_ns + s.transfer_ns + s.gap_ns for s in shown) or 1.0
    rows: list[Row] = []
    used: set[str] = set()
    for s in shown:
        values = {"gap": s.gap_ns, "waiting": s.waiting_ns, "transfer": s.transfer_ns}
        used |= {name for name, ns in values.items() if visible(ns, longest)}
        drawn = bar(((name, ns, span(ns)) for name, ns in values.items()), longest)
        told: list[str | Cell] = [
            s.who,
            f"{s.score:.1%}",
            span(s.late_ns),
            f"{s.last:.0%}",
            f"{s.confidence:.0%}",
            Cell(drawn, class_="bars"),
        ]
        rows.append(("warn" if s.score > 0.05 else "", told))
    named = [
        Column("who", fixed=True),
        *(Column(n, number=True, fixed=True) for n in ("lost by others", "late by", "came last", "sure")),
        Column("time spent, per collective", fixed=True),
    ]
    key = legend(entry for entry in _SPENT if entry[0] in used)
    return card("Who is late", grid("Who is late", named, rows), key)


def _others(found: list[Finding]) -> list[str]:
    """Returns the further findings, each in a line under which its details are folded."""
    out: list[str] = [_other(one) for one in found[:_MOST_OTHERS]]
    if len(found) > _MOST_OTHERS:
        out.append(_more(len(found) - _MOST_OTHERS))
    return out


def _other(found: Finding) -> Html:
    parts: list[str] = []
    if told := [*_named(found), *_place_of(found)]:
        parts.append(facts(told))
    for title, content in (
        ("What to do now", items(found.next_steps, "ol") if found.next_steps else ""),
        ("Evidence", items(found.evidence) if found.evidence else ""),
        ("Who did what", _sides_table(found.sides) if found.sides else ""),
        ("Call paths", join(*_call_paths(found))),
        (_title_of_waits(found), _edges(found) if found.edges else ""),
    ):
        if content:
            parts.append(element("div", element("h3", title), content))
    return finding(_TONE.get(found.verdict, "bad"), _name(found), found.sentence, *parts)


def _input(report: Report) -> str:
    if not report.remarks:
        return ""
    lines = [f"{f.path}: {f.message}" if f.path else f.message for f in report.remarks[:_MOST_INPUT]]
    if len(report.remarks) > _MOST_INPUT:
        lines.append(f"and {len(report.remarks) - _MOST_INPUT} more; --json has all")
    return card("Remarks on the input", items(lines))


# --- the timeline -------------------------------------------------------------------------------------


def _of_culprits(report: Report, ranks: list[int]) -> str:
    """Returns which ranks are drawn if not all are: how many of the culprits, and a sample."""
    culprits = _culprits(report)
    if not culprits:
        return ", a sample"
    drawn, every = len(culprits.intersection(ranks)), len(culprits)
    who = f"{drawn} of the {every:,} culprits" if drawn < every else f"all {every} culprits"
    return f": {'the culprit' if drawn == every == 1 else who}, and a sample of the others"


def _timeline_section(report: Report, table: Table) -> str:
    if not len(table):
        return ""
    ranks = chosen_ranks(report, table)
    notes = []
    if len(ranks) < len(table.ranks):
        notes.append(
            f"{len(ranks)} of {len(table.ranks):,} ranks are drawn{_of_culprits(report, ranks)}."
            " The verdict covers all ranks."
        )
    most = most_per_rank(ranks)
    if any(source.end - source.begin > most for source in table.sources):
        notes.append(f"The last {most:,} operations of each rank are drawn; --perfetto has more.")
    note = element("p", " ".join(notes), class_="note") if notes else ""
    without = Html("<noscript>The timeline needs JavaScript; all the rest of the page does not.</noscript>")
    return card("Timeline", note, element("div", without, id="timeline"))
