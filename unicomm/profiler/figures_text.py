"""The report on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.texts import printable, span

from .figures import OperationFigures, Report

_SHOWN_RANKS = 16


def size(count: float) -> str:
    """Formats a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _name(text: str) -> Text:
    """A text that may hold names of a trace."""
    return Text(printable(text))


def late_rank(one: OperationFigures) -> str:
    """Formats the rank that was last most often, its share and its lateness; "" when there is none."""
    if one.late_rank < 0:
        return ""
    return f"{one.late_rank} ({one.late_share:.0%}, {span(max(one.late_ns, 0))})"


def _grid(title: str, *columns: str, left: int = 1) -> Table:
    grid = Table(title=title, title_justify="left", show_edge=False)
    for at, name in enumerate(columns):
        grid.add_column(
            name, justify="left" if at < left else "right", no_wrap=at > 0 or left == 1, overflow="fold"
        )
    return grid


def summary(found: Report) -> str:
    """Returns the largest delay and the most expensive rank as two sentences."""
    if not found.delays:
        return "There is no collective of several ranks, so no rank waits for another."
    worst = found.delays[0]
    costly = max(found.ranks, key=lambda r: r.cost_ns)
    return (
        f"The largest delay: rank {worst.rank} came {span(worst.late_ns)} late to {worst.op} #{worst.seq} of"
        f" '{worst.group}', and the other ranks together waited {span(worst.cost_ns)}."
        f" Most time was lost by waiting for rank {costly.rank}: {span(costly.cost_ns)} of all other ranks;"
        f" it was last in {costly.last:.0%} of its collectives."
    )


def render(found: Report) -> RenderableType:
    # Two tables, because one with all columns would not fit 80 columns of a terminal.
    operations = _grid(
        "Operations (totals of one rank; messages and their bytes: of all ranks)",
        *("group", "operation", "count", "bytes", "time", "waiting", "bus/s"),
        left=2,
    )
    singly = _grid(
        "Per call",
        *("group", "operation", "median", "overlap", "skew", "maximum", "late rank"),
        left=2,
    )
    for one in found.operations:
        late = late_rank(one)
        operations.add_row(
            _name(one.group),
            _name(one.op),
            str(one.count) + (f" ({one.unfinished} open)" if one.unfinished else ""),
            size(one.bytes),
            span(one.time_ns) if one.timed else "",
            span(one.waiting_ns) if one.timed else "",
            size(one.bus_bandwidth) if one.bus_bandwidth else "",
        )
        singly.add_row(
            _name(one.group),
            _name(one.op),
            span(one.median_ns) if one.timed else "",
            "" if one.overlap is None or not one.timed else f"{one.overlap:.0%}",
            *((span(one.skew_ns), span(one.most_skew_ns), late) if late else ("", "", "")),
        )
    delays = _grid("Largest delays", "rank", "collective", "late", "others waited", left=2)
    for delay in found.delays:
        delays.add_row(
            str(delay.rank),
            _name(f"{delay.op} #{delay.seq} of '{delay.group}'"),
            span(delay.late_ns),
            span(delay.cost_ns),
        )
    ranks = _grid("Ranks", "rank", "operations", "time", "waiting", "last in", "cost others", "clock")
    shown = sorted(found.ranks, key=lambda r: -r.cost_ns)[:_SHOWN_RANKS]
    for rank in shown:
        ranks.add_row(
            str(rank.rank),
            str(rank.operations),
            span(rank.communicating_ns),
            span(rank.waiting_ns),
            f"{rank.last:.0%}",
            span(rank.cost_ns),
            f"{rank.clock_ns / 1000:+.1f} us",
        )
    more = len(found.ranks) - len(shown)
    tail = [Text(f"and {more} more ranks, which cost the others less time")] if more else []
    title = _name(f"{found.source}, {span(found.span_ns)} from the first to the last operation.")
    return Group(
        title, _name(summary(found)), Text(), operations, Text(), singly, Text(), delays, Text(), ranks, *tail
    )
