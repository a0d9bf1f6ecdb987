"""The wait-for graph of a finding as an SVG drawing. Ranks that wait for the same ranks share a box."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

from unicomm.flight_recorder.analysis.verdict import Finding, Verdict
from unicomm.flight_recorder.texts import format_ranks

_WIDTH, _HEIGHT = 190, 54  # the size of a box
_MOST_BOXES = 24


@dataclass
class _Box:
    ranks: list[int]
    operation: str
    where: str
    waits_for: set[int]  # ranks
    column: int = 0
    x: float = 0.0
    y: float = 0.0
    to: list[_Box] = field(default_factory=list)


def draw(found: Finding) -> str:
    """Returns the drawing; "" if it would have too many boxes to be useful."""
    boxes = _boxes(found)
    if len(boxes) > _MOST_BOXES:
        return ""
    width, height = _circle(boxes) if found.verdict is Verdict.WAIT_CYCLE else _layers(boxes)
    culprits = set(found.culprits)
    arrows = [_arrow(a, b) for a in boxes for b in a.to]
    drawn = [_draw_box(box, bool(culprits & set(box.ranks))) for box in boxes]
    return (
        f'<svg class="waits" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
        ' role="img" aria-label="who waits for whom">'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
        ' orient="auto-start-reverse"><path d="M0 0L10 5L0 10z"/></marker></defs>'
        f"{''.join(arrows)}{''.join(drawn)}</svg>"
    )


def _boxes(found: Finding) -> list[_Box]:
    waiting: dict[object, _Box] = {}
    for i, edge in enumerate(found.edges):
        alone = i if found.verdict is Verdict.WAIT_CYCLE else -1
        key = (tuple(sorted(edge.waits_for)), edge.operation, edge.group, edge.seq_num, edge.where, alone)
        number = f" #{edge.seq_num}" if edge.seq_num >= 0 else ""
        name = f"{edge.operation.split(' ')[0]}{number} of {edge.group}"
        box = waiting.setdefault(key, _Box([], name, edge.where.rsplit("/", 1)[-1], set(edge.waits_for)))
        box.ranks.append(edge.rank)
        if alone < 0 and (edge.group, edge.seq_num) == (found.group, found.seq_num):
            # One edge stands for all ranks that wait in the operation of the finding.
            box.ranks = sorted({*box.ranks, *found.victims} - box.waits_for)
    boxes = list(waiting.values())
    have = {rank for box in boxes for rank in box.ranks}
    ends: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted({r for box in boxes for r in box.waits_for} - have):
        ends.setdefault(tuple(i for i, box in enumerate(boxes) if rank in box.waits_for), []).append(rank)
    boxes += [_Box(ranks, "", "", set()) for ranks in ends.values()]
    for box in boxes:
        box.to = [other for other in boxes if other is not box and box.waits_for & set(other.ranks)]
    return boxes


def _circle(boxes: list[_Box]) -> tuple[float, float]:
    radius = max(95.0, len(boxes) * 48.0 / 2)
    stretch = 1.35
    for i, box in enumerate(boxes):
        angle = 2 * math.pi * i / len(boxes) - math.pi / 2
        if len(boxes) == 2:
            angle = math.pi * (1 - i)
        box.x = radius * stretch * math.cos(angle)
        box.y = radius * math.sin(angle)
    return _shift(boxes)


def _layers(boxes: list[_Box]) -> tuple[float, float]:
    for _ in boxes:  # the longest path to an end; bounded, because it is infinite in a cycle
        for box in boxes:
            box.column = min(max((other.column + 1 for other in box.to), default=0), len(boxes))
    used = sorted({box.column for box in boxes}, reverse=True)
    for at, column in enumerate(used):
        inside = [box for box in boxes if box.column == column]
        for i, box in enumerate(inside):
            box.x = at * (_WIDTH + 90.0)
            box.y = (i - (len(inside) - 1) / 2) * (_HEIGHT + 22.0)
    return _shift(boxes)


def _shift(boxes: list[_Box]) -> tuple[float, float]:
    """Moves the boxes so that all coordinates are positive, and returns width and height."""
    left, top = min(b.x for b in boxes), min(b.y for b in boxes)
    for box in boxes:
        box.x += _WIDTH / 2 + 4 - left
        box.y += _HEIGHT / 2 + 4 - top
    return max(b.x for b in boxes) + _WIDTH / 2 + 4, max(b.y for b in boxes) + _HEIGHT / 2 + 4


def _border(box: _Box, dx: float, dy: float) -> tuple[float, float]:
    """Returns the point at which a line from the middle of a box leaves it in a direction."""
    scale = min(
        (_WIDTH / 2 + 5) / abs(dx) if dx else math.inf, (_HEIGHT / 2 + 5) / abs(dy) if dy else math.inf
    )
    return box.x + dx * scale, box.y + dy * scale


def _arrow(a: _Box, b: _Box) -> str:
    dx, dy = b.x - a.x, b.y - a.y
    back = a in b.to
    length = math.hypot(dx, dy) or 1.0
    # Two boxes that wait for each other have two parallel arrows.
    ox, oy = (-dy / length * 9, dx / length * 9) if back else (0.0, 0.0)
    (x1, y1), (x2, y2) = _border(a, dx, dy), _border(b, -dx, -dy)
    return (
        f'<line x1="{x1 + ox:.1f}" y1="{y1 + oy:.1f}" x2="{x2 + ox:.1f}" y2="{y2 + oy:.1f}"'
        ' marker-end="url(#head)"/>'
    )


def _draw_box(box: _Box, culprit: bool) -> str:
    ranks = format_ranks(sorted(box.ranks))
    name = (
        f"{len(box.ranks)} ranks" if len(ranks) > 18 else f"rank{'s' if len(box.ranks) > 1 else ''} {ranks}"
    )
    lines = [(name, "name")]
    lines += [
        (text if len(text) <= 30 else text[:29] + "…", "what") for text in (box.operation, box.where) if text
    ]
    if not box.operation:
        lines.append(("waits for no rank" if not box.to else "", "what"))
    y = box.y - (len(lines) - 1) * 7.5 + 4
    texts = "".join(
        f'<text x="{box.x:.1f}" y="{y + i * 15:.1f}" class="{kind}">{escape(text)}</text>'
        for i, (text, kind) in enumerate(lines)
    )
    return (
        f'<g class="{"bad" if culprit else ""}"><rect x="{box.x - _WIDTH / 2:.1f}"'
        f' y="{box.y - _HEIGHT / 2:.1f}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>{texts}</g>'
    )
