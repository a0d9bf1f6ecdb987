"""`unicomm trace diff`: the difference of two runs on a terminal."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.analysis.data_diff import DataDifference
from unicomm.flight_recorder.analysis.diff import Change, Diff, Difference
from unicomm.flight_recorder.texts import ranks_text, span

_MOST_DIFFERENCES, _MOST_CHANGES = 8, 15


def render(diff: Diff) -> RenderableType:
    """Returns what `unicomm trace diff` prints."""
    parts: list[RenderableType] = []
    if diff.same:
        data = f", the data of {diff.data.compared} of them too" if diff.data.compared else ""
        parts.append(Text(f"The runs are the same: {diff.compared} operations{data}.", "green"))
    if diff.data.first is not None:
        parts.append(Text("the first operation whose data differ", "bold"))
        parts.append(_data(diff.data.first))
    elif diff.data.missing:
        parts.append(Text(diff.data.missing, "dim"))
    for ranks, run in ((diff.only_a, "A"), (diff.only_b, "B")):
        if ranks:
            parts.append(Text(f"only in {run}: {ranks_text(ranks)}", "red"))
    if diff.differences:
        parts.append(Text("the first operation that differs", "bold"))
        parts.append(_difference(diff.differences[0]))
        others = diff.differences[1:]
        if others:
            parts.append(Text(f"also different ({len(others)})", "bold"))
            parts += [_difference(d) for d in others[:_MOST_DIFFERENCES]]
        if len(others) > _MOST_DIFFERENCES:
            parts.append(Text(f"  ... and {len(others) - _MOST_DIFFERENCES} more (--json has all)"))
    if diff.changes:
        parts += [Text(""), _changes(diff.changes)]
    return Group(*parts)


def _difference(found: Difference) -> RenderableType:
    what = f"#{found.seq_num} of '{found.group}'" + (f" with rank {found.peer}" if found.peer >= 0 else "")
    out = Text()
    out.append(f"  {ranks_text(found.ranks)}", "bold red").append(
        f", {what}, {span(found.a_ns)} into the run\n"
    )
    for run, call, where in (("A", found.a, found.a_where), ("B", found.b, found.b_where)):
        out.append(f"    {run}  ").append(call or "no such operation", "" if call else "dim")
        if where:
            out.append(f"  {where}", "cyan")
        out.append("\n")
    out.rstrip()
    return out


def _data(found: DataDifference) -> RenderableType:
    out = Text()
    who = ranks_text(found.input_ranks or found.output_ranks)
    out.append(f"  {who}", "bold red").append(
        f", #{found.seq_num} of '{found.group}', {span(found.a_ns)} into"
    )
    out.append(f" the run\n    {found.operation}").append(f"  {found.where}", "cyan")
    if found.b_where not in ("", found.where):
        out.append("  in B ").append(found.b_where, "cyan")
    if found.only_output:
        out.append(
            f"\n    only the output differs, on {ranks_text(found.output_ranks)}: all inputs are alike"
        )
    else:
        out.append(f"\n    the input differs on {who}")
        if found.output_ranks:
            out.append(f", and then the output on {ranks_text(found.output_ranks)}")
    if found.later > 1:
        out.append(f"\n    {found.later} operations have other data in all", "dim")
    return out


def _changes(changes: list[Change]) -> RenderableType:
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2))
    for heading in ("operation", "group", "count A", "count B", "median A", "median B", "change", "total"):
        table.add_column(
            heading, header_style="bold", justify="left" if heading in ("operation", "group") else "right"
        )
    for c in changes[:_MOST_CHANGES]:
        more = c.b_total_ns - c.a_total_ns
        change = "" if math.isnan(c.ratio) else f"{c.ratio - 1:+.0%}"
        style = "red" if c.ratio > 1.1 else "green" if c.ratio < 0.9 else ""
        table.add_row(
            Text(c.call),
            Text(c.group),
            f"{c.a_count:,}",
            f"{c.b_count:,}",
            span(c.a_median_ns) if c.a_count else "",
            span(c.b_median_ns) if c.b_count else "",
            Text(change, style),
            ("+" if more > 0 else "") + span(more),
        )
    if len(changes) > _MOST_CHANGES:
        return Group(table, Text(f"... and {len(changes) - _MOST_CHANGES} more (--json has all)", "dim"))
    return table
