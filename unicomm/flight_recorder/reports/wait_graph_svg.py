"""The wait-for graph of a finding as SVG. A rank is in one box, with the ranks that wait as it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unicomm.flight_recorder.analysis.verdict import Edge, Finding, Verdict
from unicomm.flight_recorder.pages.elements import Html, element, join
from unicomm.flight_recorder.texts import format_ranks

_WIDTH, _HEIGHT = 216, 58  # the size of a box
_ACROSS, _ALONG, _BETWEEN = 64.0, 40.0, 20.0  # distances of layers side by side, below each other; of boxes
_MOST_BOXES = 24
_MOST_TEXT = 33


@dataclass
class _Box:
    ranks: list[int]
    edges: list[Edge]
    waits_for: set[int]  # ranks
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    to: list[_Box] = field(default_factory=list)


def draw(found: Finding, waiting: Mapping[int, tuple[str, str]] | None = None) -> Html:
    """Returns two drawings, for wide and for narrow pages; "" if there would be too many boxes.

    The edges stand for all ranks that wait. `waiting` has the operation and its file:line of those that wait
    in the collective of the finding.
    """
    boxes = _boxes(found, waiting or {})
    if len(boxes) > _MOST_BOXES:
        return Html("")
    cycle = found.verdict is Verdict.WAIT_CYCLE
    wide = _drawing(boxes, _circle(boxes) if cycle and len(boxes) > 2 else _layers(boxes), found, "wide")
    return join(wide, _drawing(boxes, _layers(boxes, below=True), found, "tall"))


def _drawing(boxes: list[_Box], size: tuple[float, float], found: Finding, shape: str) -> Html:
    culprits = set(found.culprits)
    right, below = _room(boxes)
    width, height = size[0] + right, size[1] + below
    arrows = [_arrow(a, b, shape) for a in boxes for b in a.to]
    drawn = [_draw_box(box, bool(culprits & set(box.ranks))) for box in boxes]
    of_head = {"viewBox": "0 0 10 10", "refX": 9, "refY": 5, "markerWidth": 7, "markerHeight": 7}
    tip = element("path", class_="head", d="M0 0L10 5L0 10z")
    head = element("marker", tip, id=f"head-{shape}", orient="auto-start-reverse", **of_head)
    named = {"role": "img", "aria_label": "who waits for whom, as in the list beside it"}
    shown = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    return element("svg", element("defs", head), *arrows, *drawn, class_=f"waits {shape}", **shown, **named)


def _boxes(found: Finding, waiting: Mapping[int, tuple[str, str]]) -> list[_Box]:
    cycle = found.verdict is Verdict.WAIT_CYCLE
    waits: dict[int, list[Edge]] = {}
    for edge in found.edges:
        waits.setdefault(edge.rank, []).append(edge)
    of_all = [e for e in found.edges if (e.group, e.seq_num) == (found.group, found.seq_num)]
    if of_all and not cycle:
        drawn = {_shown(edge.operation, edge.where): edge for edge in reversed(of_all)}
        for rank, call in waiting.items():
            alike = drawn.setdefault(_shown(*call), replace(of_all[0], operation=call[0], where=call[1]))
            waits.setdefault(rank, [alike])
    boxes_of: dict[object, _Box] = {}
    for rank, edges in waits.items():
        same = tuple((e.operation, e.group, e.seq_num, e.where, tuple(sorted(e.waits_for))) for e in edges)
        box = boxes_of.setdefault(rank if cycle else same, _Box([], edges, _targets(edges)))
        box.ranks.append(rank)
    boxes = list(boxes_of.values())
    ends: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({rank for box in boxes for rank in box.waits_for} - set(waits)):
        ends.setdefault(tuple(i for i, box in enumerate(boxes) if rank in box.waits_for), []).append(rank)
    boxes += [_Box(ranks, [], set()) for ranks in ends.values()]
    boxes = boxes if cycle else _joined(boxes)
    for box in boxes:
        box.to = [other for other in boxes if other is not box and box.waits_for & set(other.ranks)]
    return boxes


def _targets(edges: list[Edge]) -> set[int]:
    return {rank for edge in edges for rank in edge.waits_for}


def _joined(boxes: list[_Box]) -> list[_Box]:
    """Joins boxes that differ in their groups only: the same call, for ranks of the same boxes."""
    home = {rank: i for i, box in enumerate(boxes) for rank in box.ranks}
    out: dict[object, _Box] = {}
    for i, box in enumerate(boxes):
        calls = tuple((e.operation, e.seq_num, e.where) for e in box.edges)
        key = (calls, frozenset(home[rank] for rank in box.waits_for)) if calls else i
        if first := out.get(key):
            first.ranks += box.ranks
            first.edges = [*first.edges, *box.edges]
            first.waits_for |= box.waits_for
        else:
            out[key] = box
    return list(out.values())


def _circle(boxes: list[_Box]) -> tuple[float, float]:
    radius = max(100.0, len(boxes) * 27.0)
    for i, box in enumerate(boxes):
        angle = 2 * math.pi * i / len(boxes) - math.pi / 2
        box.x = radius * 1.5 * math.cos(angle)
        box.y = radius * math.sin(angle)
    return _shift(boxes)


def _layers(boxes: list[_Box], below: bool = False) -> tuple[float, float]:
    """Places those who wait before those for whom they wait: to their left, or above them (`below`)."""
    for box in boxes:
        box.layer = 0
    for _ in boxes:  # the longest path to an end; bounded, because it is infinite in a cycle
        for box in boxes:
            box.layer = min(max((other.layer + 1 for other in box.to), default=0), len(boxes))
    used = sorted({box.layer for box in boxes}, reverse=True)
    if len(used) < 2 and len(boxes) > 1:  # a cycle has no layers
        used = list(range(len(boxes)))
        for at, box in enumerate(boxes):
            box.layer = at
    for at, layer in enumerate(used):
        inside = [box for box in boxes if box.layer == layer]
        for i, box in enumerate(inside):
            if (
                below
            ):  # boxes of a layer are below each other too, moved a little, so that the drawing is narrow
                box.x = 0.0
                before = sum(1 for other in boxes if used.index(other.layer) < at)
                box.y = (before + i) * (_HEIGHT + _ALONG)
            else:
                box.x = at * (_WIDTH + _ACROSS)
                box.y = (i - (len(inside) - 1) / 2) * (_HEIGHT + _BETWEEN)
    return _shift(boxes)


def _shift(boxes: list[_Box]) -> tuple[float, float]:
    """Moves the boxes so that all coordinates are positive, and returns width and height."""
    left, top = min(b.x for b in boxes), min(b.y for b in boxes)
    for box in boxes:
        box.x += _WIDTH / 2 + 4 - left
        box.y += _HEIGHT / 2 + 4 - top
    return max(b.x for b in boxes) + _WIDTH / 2 + 4, max(b.y for b in boxes) + _HEIGHT / 2 + 4


def _room(boxes: list[_Box]) -> tuple[float, float]:
    """Returns the room for arrows that go around boxes: to the right, and below."""
    near = (_ACROSS + _WIDTH, _ALONG + _HEIGHT)
    far = [(b.x - a.x, b.y - a.y) for a in boxes for b in a.to]
    right = any(dx == 0 and abs(dy) > near[1] for dx, dy in far)
    below = any(dy == 0 and abs(dx) > near[0] for dx, dy in far)
    return 52.0 * right, 46.0 * below


def _border(box: _Box, dx: float, dy: float) -> tuple[float, float]:
    """Returns the point at which a line from the middle of a box leaves it in a direction."""
    scale = min(
        (_WIDTH / 2 + 5) / abs(dx) if dx else math.inf, (_HEIGHT / 2 + 5) / abs(dy) if dy else math.inf
    )
    return box.x + dx * scale, box.y + dy * scale


def _arrow(a: _Box, b: _Box, shape: str) -> Html:
    dx, dy = b.x - a.x, b.y - a.y
    if dx == 0 and abs(dy) > _ALONG + _HEIGHT:  # around the boxes between them
        side, out = a.x + _WIDTH / 2 + 5, 62.0
        far = side + out
        way = f"M{side:.1f} {a.y:.1f}C{far:.1f} {a.y:.1f} {far:.1f} {b.y:.1f} {side:.1f} {b.y:.1f}"
    elif dy == 0 and abs(dx) > _ACROSS + _WIDTH:
        side, out = a.y + _HEIGHT / 2 + 5, 54.0
        far = side + out
        way = f"M{a.x:.1f} {side:.1f}C{a.x:.1f} {far:.1f} {b.x:.1f} {far:.1f} {b.x:.1f} {side:.1f}"
    else:
        length = math.hypot(dx, dy) or 1.0
        # Two boxes that wait for each other have two parallel arrows.
        ox, oy = (-dy / length * 9, dx / length * 9) if a in b.to else (0.0, 0.0)
        (x1, y1), (x2, y2) = _border(a, dx, dy), _border(b, -dx, -dy)
        way = f"M{x1 + ox:.1f} {y1 + oy:.1f}L{x2 + ox:.1f} {y2 + oy:.1f}"
    return element("path", class_="arrow", d=way, marker_end=f"url(#head-{shape})")


def _shown(operation: str, where: str) -> tuple[str, str]:
    """Returns what a box shows of a call: the operation without arguments, the line without a folder."""
    return operation.split(" ", maxsplit=1)[0], where.rsplit("/", 1)[-1]


def _lines(edges: list[Edge]) -> list[str]:
    """Returns in which operation the ranks of a box wait, and where it was called."""
    if not edges:
        return ["waits for no rank"]
    first, groups = edges[0], list(dict.fromkeys(edge.group for edge in edges))
    calls = {(edge.operation, edge.seq_num, edge.where) for edge in edges}
    number = f" #{first.seq_num}" if first.seq_num >= 0 else ""
    of = groups[0] if len(groups) == 1 or len(calls) > 1 else f"{len(groups)} communicators"
    operation, where = _shown(first.operation, first.where)
    more = f"and {len(calls) - 1} more operation{'s' * (len(calls) > 2)}"
    return [f"{operation}{number} of {of}", more if len(calls) > 1 else where]


def _draw_box(box: _Box, culprit: bool) -> Html:
    ranks = format_ranks(sorted(box.ranks)).replace(",", ", ")
    several = "s" if len(box.ranks) > 1 else ""
    name = f"{len(box.ranks)} ranks" if len(ranks) > 22 else f"rank{several} {ranks}"
    if culprit:
        name += ", culprit" + several
    lines = [name, *filter(None, _lines(box.edges))]
    y = box.y - (len(lines) - 1) * 8 + 4
    texts = [
        element(
            "text",
            line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + "…",
            class_="what" if i else "name",
            x=f"{box.x:.1f}",
            y=f"{y + i * 16:.1f}",
        )
        for i, line in enumerate(lines)
    ]
    corner = {"x": f"{box.x - _WIDTH / 2:.1f}", "y": f"{box.y - _HEIGHT / 2:.1f}"}
    frame = element("rect", width=_WIDTH, height=_HEIGHT, rx=8, **corner)
    return element("g", frame, *texts, class_="bad" if culprit else None)
