"""The report as one HTML page: which rank the others wait for, where the time goes, and all figures.

It has the look of the recorder's page: flight_recorder/pages.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from unicomm.flight_recorder.pages.charts import Dot, Panel, columns, dots
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
    grid,
    items,
    legend,
    verdict,
    visible,
)
from unicomm.flight_recorder.pages.page import page as whole_page
from unicomm.flight_recorder.texts import span

from .figures import OperationFigures, RankFigures, Report
from .figures_text import size, summary

MOST_COLUMNS = 128  # the maximum number of ranks in the chart
_MOST_ROWS, _MOST_BARS = 256, 12
_WORTH_A_LOOK = 0.05  # the share of the others' time from which a rank that they wait for is the answer
_PARTS = (("waiting", "waiting for the last rank"), ("transfer", "transfer"))


def write(found: Report, path: Path) -> None:
    """Writes the page. Raises `OSError`."""
    path.write_text(page(found), encoding="utf-8")


def page(found: Report) -> str:
    """Returns the text of the page."""
    count = sum(o.count for o in found.operations if o.timed)
    parts: list[str] = [_verdict(found)]
    if found.remarks:
        parts.append(card("Remarks on the input", items(found.remarks)))
    parts += [_times(found), _ranks(found), _delays(found), _operations(found), _rank_table(found)]
    told = (found.source, f"{count:,} operations", f"{span(found.span_ns)} from the first to the last")
    return whole_page("profile", "communication", told, filter(None, parts))


def _lost(found: Report, rank: RankFigures) -> float:
    """Returns the share of the other ranks' time that they lost by waiting for a rank."""
    return rank.cost_ns / max(found.span_ns * (len(found.ranks) - 1), 1)


def _verdict(found: Report) -> Html:
    if not found.delays or len(found.ranks) < 2:
        return verdict("good", "No rank waits", summary(found))
    worst = max(found.ranks, key=lambda r: r.cost_ns)
    share = _lost(found, worst)
    if share >= _WORTH_A_LOOK:
        tone, name = "warn", "Ranks wait"
        sentence = (
            f"Rank {worst.rank} makes the others wait: {span(worst.cost_ns)} together, {share:.0%} of their"
            " time."
        )
    else:
        tone, name = "good", "No rank holds the others up"
        sentence = (
            f"The others waited {span(worst.cost_ns)} together for rank {worst.rank}, more than for any"
            f" other rank: {share:.1%} of their time."
        )
    delay = found.delays[0]
    told: list[tuple[str, str]] = [
        ("rank", chips([worst.rank], tone)),
        ("was last in", f"{worst.last:.0%} of its collectives"),
        (
            "largest delay",
            f"rank {delay.rank}, {span(delay.late_ns)} late to {delay.op} #{delay.seq} of {delay.group}",
        ),
        ("time in operations", f"{span(_mean([r.communicating_ns for r in found.ranks]))} per rank"),
        ("of which waiting", span(_mean([r.waiting_ns for r in found.ranks]))),
    ]
    return verdict(tone, name, sentence, facts(told))


def _mean(values: list[int]) -> float:
    return sum(values) / max(len(values), 1)


def _name(one: OperationFigures) -> Html:
    return element("span", one.op, element("small", ", ".join(filter(None, (one.group, _about(one))))))


def _about(one: OperationFigures) -> str:
    """Returns what the program says of a group, and its ranks where its name does not tell them."""
    ranks = f"ranks {one.members}"
    said = one.description if one.description not in one.group else ""
    return ", ".join(filter(None, (said, "" if ranks in one.group else ranks)))


def _times(found: Report) -> str:
    timed = [o for o in found.operations if o.timed]
    if not timed:
        return ""
    longest = max(o.waiting_ns + o.transfer_ns for o in timed)
    rows: list[Row] = []
    for one in timed[:_MOST_BARS]:
        values = {"waiting": one.waiting_ns, "transfer": one.transfer_ns}
        drawn = bar(((n, ns, span(ns)) for n, ns in values.items()), longest)
        told = (span(one.time_ns), span(one.waiting_ns))
        rows.append(("", [_name(one), *told, Cell(drawn, one.time_ns, "bars")]))
    named = [
        Column("operation", fixed=True),
        *(Column(name, number=True, fixed=True) for name in ("per rank", "waiting")),
        Column("", fixed=True),
    ]
    used = {
        n
        for o in timed[:_MOST_BARS]
        for n, ns in (("waiting", o.waiting_ns), ("transfer", o.transfer_ns))
        if visible(ns, longest)
    }
    more = len(timed) - _MOST_BARS
    note = (
        element("p", f"and {more} more, which took less time: see All operations", class_="note")
        if more > 0
        else ""
    )
    keys = legend(entry for entry in _PARTS if entry[0] in used)
    return card("Where the time goes", grid("Where the time goes", named, rows), note, keys)


def _chosen(found: Report) -> list[RankFigures]:
    """Returns the ranks in the chart: all, or the costliest and an even sample of the rest, by number."""
    ranks = sorted(found.ranks, key=lambda r: r.rank)
    if len(ranks) <= MOST_COLUMNS:
        return ranks
    costly = sorted(ranks, key=lambda r: -r.cost_ns)[: MOST_COLUMNS // 4]
    named = {r.rank for r in costly}
    rest = [r for r in ranks if r.rank not in named]
    even = np.linspace(0, len(rest) - 1, MOST_COLUMNS - len(costly)).astype(int)
    return sorted([*costly, *(rest[i] for i in even)], key=lambda r: r.rank)


def _ranks(found: Report) -> str:
    ranks = _chosen(found)
    if len(ranks) < 2:
        return ""
    note: str = ""
    if len(ranks) < len(found.ranks):
        text = (
            f"{len(ranks)} of {len(found.ranks):,} ranks are drawn: those that the others waited for most,"
            " and an even sample of the rest."
        )
        note = element("p", text, class_="note")
    details = [
        f"rank {r.rank}: the others wait {span(r.cost_ns)} for it, and it waits {span(r.waiting_ns)} for them"
        for r in ranks
    ]
    panels = [
        Panel("The other ranks, together, wait for it", "cost", [r.cost_ns for r in ranks]),
        Panel("It waits for other ranks", "waiting", [r.waiting_ns for r in ranks]),
    ]
    return card(
        "Waiting, by rank", note, columns("Waiting, by rank", [str(r.rank) for r in ranks], panels, details)
    )


def _delays(found: Report) -> str:
    if not found.delays:
        return ""
    points = [
        Dot(
            d.at_ns - found.begin_ns,
            max(d.late_ns, 0),
            f"rank {d.rank}",
            f"rank {d.rank} came {span(d.late_ns)} late to {d.op} #{d.seq} of {d.group};"
            f" the other ranks together waited {span(d.cost_ns)}",
        )
        for d in found.delays
    ]
    named = [
        *(Column(name) for name in ("rank", "collective", "group")),
        *(Column(name, number=True) for name in ("late by", "others waited", "at")),
    ]
    rows: list[Row] = [
        (
            "",
            [
                Cell(f"rank {d.rank}", d.rank),
                f"{d.op} #{d.seq}",
                d.group,
                Cell(span(d.late_ns), d.late_ns),
                Cell(span(d.cost_ns), d.cost_ns),
                Cell(span(d.at_ns - found.begin_ns), d.at_ns),
            ],
        )
        for d in found.delays
    ]
    return card(
        "The largest delays",
        element("p", "How late the last rank came, over the time of the run.", class_="note"),
        dots("The largest delays", points, found.span_ns),
        grid("The largest delays", named, rows, sortable=True),
    )


def _operations(found: Report) -> str:
    titles = (
        "count",
        "bytes",
        "time",
        "waiting",
        "median",
        "overlap",
        "bus/s",
        "skew",
        "max. skew",
        "last rank",
    )
    named = [Column("operation"), Column("group"), *(Column(name, number=True) for name in titles)]
    rows: list[Row] = []
    for o in found.operations[:_MOST_ROWS]:
        times = [Cell(span(ns) if o.timed else "", ns) for ns in (o.time_ns, o.waiting_ns, o.median_ns)]
        skews = [Cell(span(ns) if o.late_rank >= 0 else "", ns) for ns in (o.skew_ns, o.most_skew_ns)]
        late: str = ""
        if o.late_rank >= 0:
            often = f"{o.late_share:.0%}, {span(max(o.late_ns, 0))} late"
            late = element("span", f"rank {o.late_rank}", element("small", often))
        count = f"{o.count:,}"
        if o.unfinished:
            count = element("span", count, element("small", f"{o.unfinished} unfinished"))
        overlap = "" if o.overlap is None or not o.timed else f"{o.overlap:.0%}"
        rows.append(
            (
                "",
                [
                    o.op,
                    element("span", o.group, element("small", _about(o))),
                    Cell(count, o.count),
                    Cell(size(o.bytes), o.bytes),
                    *times,
                    Cell(overlap, o.overlap or 0),
                    Cell(f"{size(o.bus_bandwidth)}/s" if o.bus_bandwidth else "", o.bus_bandwidth),
                    *skews,
                    Cell(late, o.late_share),
                ],
            )
        )
    told = (
        "Totals of one rank, on average; messages and their bytes are those of all ranks."
        " Skew: from the first arrival to the last."
    )
    return card(
        "All operations",
        element("p", told + _more(len(found.operations)), class_="note"),
        grid("All operations", named, rows, sortable=True),
    )


def _rank_table(found: Report) -> str:
    titles = ("operations", "in operations", "waiting", "was last", "others waited", "of their time", "clock")
    named = [Column("rank"), *(Column(name, number=True) for name in titles)]
    rows: list[Row] = []
    for r in sorted(found.ranks, key=lambda r: (-r.cost_ns, r.rank))[:_MOST_ROWS]:
        lost = _lost(found, r) if len(found.ranks) > 1 else 0.0
        cells = [
            Cell(f"rank {r.rank}", r.rank),
            Cell(f"{r.operations:,}", r.operations),
            *(Cell(span(ns), ns) for ns in (r.communicating_ns, r.waiting_ns)),
            Cell(f"{r.last:.0%}", r.last),
            Cell(span(r.cost_ns), r.cost_ns),
            Cell(f"{lost:.1%}", lost),
            Cell(f"{r.clock_ns / 1000:+.1f} us", r.clock_ns),
        ]
        rows.append(("warn" if lost >= _WORTH_A_LOOK else "", cells))
    told = "Clock: how far this rank's is ahead of the typical rank's."
    return card(
        "All ranks",
        element("p", told + _more(len(found.ranks)), class_="note"),
        grid("All ranks", named, rows, sortable=True),
    )


def _more(count: int) -> str:
    return f" The first {_MOST_ROWS} of {count:,}; --json has all." if count > _MOST_ROWS else ""
