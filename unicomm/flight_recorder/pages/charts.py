"""Charts as SVG drawings whose widths are shares of the page's, so that no text is scaled on a narrow one.

A chart shows what a table beside it has as text; readers without a pointer lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unicomm.flight_recorder.texts import span

from .elements import Html, element, join

_TOP, _AXIS = 14, 20  # room for labels above the largest value, and for those of the horizontal axis
_NARROW = 234  # the width of a plot on a phone, in pixels; a digit is 7 wide
_ROOM = 12.0  # per cent of the width, for a label


@dataclass(frozen=True)
class Panel:
    """A row of columns over the same places. `part` is the style of its columns (see page.css)."""

    title: str
    part: str
    values: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A point in time `at_ns` with a duration as its height."""

    at_ns: float
    height_ns: float
    label: str
    title: str


def ticks(most: float, count: int = 3) -> list[float]:
    """Returns up to `count` round values above 0, of which the last is at least `most`."""
    if most <= 0:
        return [1.0]
    rough = most / count
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(k * ten for k in (1, 2, 5, 10) if k * ten >= rough * (1 - 1e-9))
    return [step * i for i in range(1, math.ceil(most / step - 1e-9) + 1)]


def columns(title: str, names: Sequence[str], panels: Sequence[Panel], details: Sequence[str]) -> Html:
    """Returns a column for each name, in panels below each other, each with its own scale in nanoseconds.

    `details` is what the pointer shows over a column.
    """
    fit = _NARROW // (7 * max(map(len, names), default=1) + 6)
    every = max(1, math.ceil(len(names) / fit))
    if every > 1:
        every = next(n for n in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, len(names)) if n >= every)
    width = 100 / max(len(names), 1)
    filled = 0.72 if len(names) > 8 else 0.36
    out = []
    for number, panel in enumerate(panels):
        last = number == len(panels) - 1
        scale = ticks(max(panel.values, default=0), 2)
        high = 84.0
        drawn = []
        for i, (value, detail) in enumerate(zip(panel.values, details, strict=True)):
            tall = value / scale[-1] * high
            at, wide = f"{(i + (1 - filled) / 2) * width:.3f}%", f"{filled * width:.3f}%"
            drawn.append(
                element(
                    "g",
                    element("title", detail),
                    _rect("target", f"{i * width:.3f}%", _TOP, f"{width:.3f}%", high),
                    _rect(f"part-{panel.part}", at, _TOP + high - tall, wide, tall),
                )
            )
            if last and i % every == 0:
                place = {"x": f"{(i + 0.5) * width:.3f}%", "y": f"{_TOP + high + 15:.0f}"}
                drawn.append(element("text", names[i], text_anchor="middle", **place))
        out.append(element("h3", panel.title, class_="panel"))
        out.append(_plot(f"{title}: {panel.title}", scale, high, _AXIS if last else 4, drawn))
    return join(*out)


def dots(title: str, points: Sequence[Dot], whole_ns: float, named: int = 3) -> Html:
    """Returns points over the time from 0 to `whole_ns`, of which the `named` highest have their labels."""
    scale = ticks(max((p.height_ns for p in points), default=0))
    high, taken, drawn = 130.0, list[float](), []
    for point in sorted(points, key=lambda p: -p.height_ns):
        x = min(max(point.at_ns / whole_ns if whole_ns else 0.0, 0.0), 1.0) * 100
        y = _TOP + high * (1 - max(point.height_ns, 0.0) / scale[-1])
        bottom = f"{_TOP + high:.1f}"
        parts = [
            element("title", point.title),
            element("line", class_="stem", x1=f"{x:.2f}%", x2=f"{x:.2f}%", y1=f"{y:.1f}", y2=bottom),
            element("circle", class_="dot", cx=f"{x:.2f}%", cy=f"{y:.1f}", r="4.5"),
        ]
        tall = point.height_ns > scale[-1] / 4
        if tall and len(taken) < named and all(abs(x - other) > _ROOM for other in taken):
            taken.append(x)
            anchor = "start" if x < _ROOM else "end" if x > 100 - _ROOM else "middle"
            parts.append(element("text", point.label, x=f"{x:.2f}%", y=f"{y - 9:.1f}", text_anchor=anchor))
        drawn.append(element("g", *parts, class_="mark"))
    drawn.reverse()
    for time in [0.0, *(t for t in ticks(whole_ns, 4) if t <= whole_ns)]:
        x = time / whole_ns * 100 if whole_ns else 0.0
        anchor = "middle" if 0 < x < 100 - _ROOM / 2 else "end" if x else "start"
        place = {"x": f"{x:.2f}%", "y": f"{_TOP + high + 15:.0f}", "text_anchor": anchor}
        drawn.append(element("text", span(time) if time else "0", **place))
    return _plot(title, scale, high, _AXIS, drawn)


def _rect(style: str, x: str, y: float, width: str, height: float) -> Html:
    return element("rect", class_=style, x=x, y=f"{y:.1f}", width=width, height=f"{height:.1f}")


def _plot(title: str, scale: Sequence[float], high: float, axis: int, drawn: Sequence[Html]) -> Html:
    """Returns a drawing beside its scale, with a line at each of its values."""
    height = f"{_TOP + high + axis:.0f}"
    texts, lines = [], []
    for value in [0.0, *scale]:
        y = _TOP + high * (1 - value / scale[-1])
        name = "0" if not value else span(value)
        texts.append(element("text", name, x="58", y=f"{y + 4:.1f}", text_anchor="end"))
        style = "grid" if value else "zero"
        lines.append(element("line", class_=style, x1="0", x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}"))
    left = element("svg", *texts, class_="chart", width="66", height=height)
    plot = element("svg", *lines, *drawn, class_="chart", height=height, role="img", aria_label=title)
    return element("div", left, plot, class_="plot")
