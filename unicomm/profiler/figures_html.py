"""The report as one HTML file with plots, which loads nothing from the network."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise ImportError(
        f"--html needs the package 'plotly' ({error}): pip install 'unicomm[profile]'"
    ) from None

from unicomm.flight_recorder.texts import span

from .figures import Report
from .figures_text import late_rank, size, summary

_STYLE = (
    "body{font:14px system-ui;margin:2em auto;max-width:75em;padding:0 1em}table{border-collapse:collapse}"
    "td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child,"
    "td:nth-child(2),th:nth-child(2){text-align:left}"
)


def write(found: Report, path: Path) -> None:
    """Writes the page. Raises `OSError`."""
    plots = [_times(found), _ranks(found), _delays(found)]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Communication</title><style>{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script><h1>Communication</h1>",
        f"<p>{escape(found.source)}, {span(found.span_ns)} from the first to the last operation.</p>",
        f"<p>{escape(summary(found))}</p>",
        *(f"<p>Note: {escape(remark)}</p>" for remark in found.remarks),
        *(plot.to_html(full_html=False, include_plotlyjs=False) for plot in plots),
        _table(found),
    ]
    path.write_text("\n".join(parts), encoding="utf-8")


def _figure(title: str, x: str, y: str, *traces: Any, stacked: bool = False) -> Any:
    figure = go.Figure(list(traces))
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        barmode="stack" if stacked else "group",
        template="plotly_white",
        height=380,
    )
    return figure


def _times(found: Report) -> Any:
    timed = [o for o in found.operations if o.timed]
    names = [escape(f"{o.op} ({o.group})") for o in timed]
    waiting = go.Bar(name="waiting", x=names, y=[o.waiting_ns / 1e6 for o in timed])
    transfer = go.Bar(name="transfer", x=names, y=[o.transfer_ns / 1e6 for o in timed])
    return _figure("Time spent in operations", "", "ms per rank", waiting, transfer, stacked=True)


def _ranks(found: Report) -> Any:
    ranks = [r.rank for r in found.ranks]
    waits = go.Bar(name="waits for other ranks", x=ranks, y=[r.waiting_ns / 1e6 for r in found.ranks])
    costs = go.Bar(name="other ranks wait for it", x=ranks, y=[r.cost_ns / 1e6 for r in found.ranks])
    return _figure("Waiting by rank", "rank", "ms", waits, costs)


def _delays(found: Report) -> Any:
    first = min((d.at_ns for d in found.delays), default=0)
    points = go.Scatter(
        mode="markers",
        x=[(d.at_ns - first) / 1e6 for d in found.delays],
        y=[d.late_ns / 1e6 for d in found.delays],
        text=[escape(f"rank {d.rank}: {d.op} #{d.seq} of {d.group}") for d in found.delays],
    )
    return _figure("Largest delays", "ms after the first delay", "ms late", points)


def _table(found: Report) -> str:
    names = (
        "group",
        "operation",
        "count",
        "bytes",
        "time spent",
        "waiting",
        "median",
        "bus bandwidth",
        "median skew",
        "late rank",
    )
    rows = []
    for o in found.operations:
        times = (o.time_ns, o.waiting_ns, o.median_ns, o.skew_ns)
        time, waiting, median, skew = (span(t) if o.timed else "" for t in times)
        cells = [o.group, o.op, str(o.count), size(o.bytes), time, waiting]
        cells += [median, f"{size(o.bus_bandwidth)}/s" if o.bus_bandwidth else "", skew, late_rank(o)]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
