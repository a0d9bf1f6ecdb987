"""`unicomm trace analyze`: a report on one terminal screen: verdict, evidence, next steps."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table as Grid
from rich.text import Text

from unicomm.flight_recorder.analysis.verdict import CalledFrom, Edge, Finding, Report, Verdict
from unicomm.flight_recorder.texts import ranks_text, span

_MOST_SIDES = 5
_MOST_OTHERS = 6
_MOST_PATHS = 2
_COLOUR = {
    Verdict.GOOD: "green",
    Verdict.SLOW: "yellow",
    Verdict.WRAPPED: "yellow",
    Verdict.NOT_READ: "yellow",
}


def render(report: Report, verbose: bool = False) -> RenderableType:
    """Returns what `unicomm trace analyze` prints; `verbose`: with the call paths of the main finding."""
    parts: list[RenderableType] = [_verdict(report.main), *_details(report.main)]
    if verbose:
        for called in report.main.call_paths:
            parts += _call_path(called)
    if len(report.findings) > 1:
        parts += _others(report.findings[1:])
    if report.main.verdict is Verdict.SLOW or any(s.score > 0.05 for s in report.late):
        parts += _stragglers(report)
    parts += _input(report)
    return Group(*parts)


def _verdict(found: Finding) -> Panel:
    return Panel(
        Text(found.sentence),
        title=f"[bold]{found.verdict.value}[/]",
        title_align="left",
        subtitle=f"confidence {found.confidence:.0%}",
        subtitle_align="right",
        border_style=_COLOUR.get(found.verdict, "red"),
        padding=(0, 1),
    )


def _details(found: Finding) -> list[RenderableType]:
    out: list[RenderableType] = []
    facts = Grid.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    if found.culprits:
        facts.add_row("culprits", Text(ranks_text(found.culprits), "bold red"))
    if found.victims:
        facts.add_row("victims", ranks_text(found.victims))
    if found.operation:
        facts.add_row("operation", Text(f"{found.operation} #{found.seq_num} of '{found.group}'"))
    if facts.row_count:
        out.append(Padding(facts, (0, 0, 0, 2)))
    if found.sides:
        out += _sides(found)
    if called := [one for one in found.call_paths if one.callers][:_MOST_PATHS]:
        out.append(Text("called from", "bold"))
        out += [_callers(one) for one in called]
    if found.evidence:
        out.append(Text("why", "bold"))
        out += [Padding(Text(line, overflow="fold"), (0, 0, 0, 2)) for line in found.evidence]
    if found.edges:
        cycle = found.verdict is Verdict.WAIT_CYCLE
        out.append(Text("the wait cycle" if cycle else "who waits for whom", "bold"))
        out += [_edge(edge) for edge in found.edges]
    if found.next_steps:
        out.append(Text("what to do now", "bold"))
        out += [Padding(Text(f"{i}. {step}"), (0, 0, 0, 2)) for i, step in enumerate(found.next_steps, 1)]
    return out


def _sides(found: Finding) -> list[RenderableType]:
    grid = Grid(show_edge=False, pad_edge=False, box=None, padding=(0, 2))
    for heading in ("ranks", "called", "at"):
        grid.add_column(heading, overflow="fold", header_style="bold")
    for i, side in enumerate(found.sides[:_MOST_SIDES]):
        style = "" if i == 0 else "red"
        grid.add_row(Text(ranks_text(side.ranks, 30), style), Text(side.what, style), Text(side.where, style))
    more = len(found.sides) - _MOST_SIDES
    rest = [Padding(Text(f"and {more} more; --json has all"), (0, 0, 0, 2))] if more > 0 else []
    return [Padding(grid, (0, 0, 0, 2)), *rest]


def _callers(called: CalledFrom) -> RenderableType:
    text = Text(f"{ranks_text(called.ranks, 30)}  ")
    return Padding(text.append(called.callers_text, "cyan"), (0, 0, 0, 2))


def _edge(edge: Edge) -> RenderableType:
    text = Text()
    text.append(f"rank {edge.rank}", "bold")
    text.append(" -> ")
    text.append(ranks_text(edge.waits_for, 30), "bold red")
    text.append(f"  {edge.operation} #{edge.seq_num} of '{edge.group}'")
    if edge.where:
        text.append(f"  {edge.where}", "cyan")
    return Padding(text, (0, 0, 0, 2))


def _call_path(called: CalledFrom) -> list[RenderableType]:
    grid = Grid.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for i, line in enumerate(called.path):
        style = "bold cyan" if i == called.user else "dim" if line.library else ""
        cells = (f"{line.file}:{line.line}", line.function, line.library)
        grid.add_row(*(Text(cell, style) for cell in cells))
    heading = f"call path of {ranks_text(called.ranks)} to {called.operation}, the innermost call first"
    return [Text(heading, "bold"), Padding(grid, (0, 0, 0, 2))]


def _others(found: list[Finding]) -> list[RenderableType]:
    out: list[RenderableType] = [Text(f"also found ({len(found)})", "bold")]
    for one in found[:_MOST_OTHERS]:
        line = Text()
        line.append(one.verdict.value, _COLOUR.get(one.verdict, "red"))
        line.append(f"  {one.sentence}")
        out.append(Padding(line, (0, 0, 0, 2)))
    if len(found) > _MOST_OTHERS:
        out.append(Padding(Text(f"... and {len(found) - _MOST_OTHERS} more (--json has all)"), (0, 0, 0, 2)))
    return out


def _stragglers(report: Report) -> list[RenderableType]:
    grid = Grid(show_edge=False, pad_edge=False, box=None, padding=(0, 2))
    grid.add_column("who is late", header_style="bold")
    for heading in ("lost by others", "late by", "came last", "waiting", "transfer", "gap before", "sure"):
        grid.add_column(heading, header_style="bold", justify="right")
    for s in report.stragglers[:6]:
        style = "yellow" if s.score > 0.05 else ""
        grid.add_row(
            Text(s.who, style),
            f"{s.score:.1%}",
            span(s.late_ns),
            f"{s.last:.0%}",
            span(s.waiting_ns),
            span(s.transfer_ns),
            span(s.gap_ns),
            f"{s.confidence:.0%}",
        )
    return [Text(""), grid]


def _input(report: Report) -> list[RenderableType]:
    formats = ", ".join(f"{n} x {name}" for name, n in report.formats.items())
    line = f"{report.entries} operations of {report.present} of {report.ranks} ranks"
    line += f", {report.groups} communicators ({formats})"
    out: list[RenderableType] = [Text(""), Text(line, "dim")]
    lines = [f"{f.path + ': ' if f.path else ''}{f.message}" for f in report.remarks[:5]]
    out += [Text(remark, "yellow") for remark in lines]
    if len(report.remarks) > 5:
        out.append(Text(f"... and {len(report.remarks) - 5} more remarks on the input", "yellow"))
    return out
