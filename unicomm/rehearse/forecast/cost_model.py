"""The time of one operation: measured where it was, else from latency and bandwidth of its links.

The algorithms are the usual ones (Thakur, Rabenseifner and Gropp, Int. J. High Perform. Comput. Appl. 19,
2005): rings for long messages, trees for short ones. A group over several nodes works inside of the nodes and
between them in turn, as hierarchical algorithms do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .topology import Link, Measured, Topology

_REDUCES = ("reduce", "broadcast")
_MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Shape:
    """Where the ranks of a group are: `local` on the node that has most of them, on `nodes` nodes."""

    local: int
    nodes: int

    @property
    def size(self) -> int:
        return self.local * self.nodes


def shape_of(ranks: Sequence[int], per_node: int) -> Shape:
    """Returns the shape of a group, whose ranks are placed on nodes of `per_node` ranks in their order."""
    count = Counter(rank // per_node for rank in ranks)
    return Shape(max(count.values(), default=1), max(len(count), 1))


def seconds(op: str, data: float, shape: Shape, topology: Topology) -> float:
    """Returns the time of an operation from the arrival of its last rank.

    `data`: the bytes of a rank's whole vector: what is reduced, gathered or exchanged in all; of a message.
    """
    if op in _MESSAGES:
        local = shape.nodes == 1
        points = (topology.measured_within if local else topology.measured_between).get("send", {}).get(2)
        link = topology.within if local else topology.between
        return interpolated(points, data) if points else link.latency + data / link.bandwidth
    within = _phase(op, data, shape.local, topology.within, topology.measured_within, shape.local, 1)
    if shape.nodes == 1:
        return within
    # Between nodes each rank moves its part of the data, over its own link or over its share of one.
    part = data / shape.local if op not in _REDUCES else data
    sharing = 1 if op in _REDUCES else shape.local
    link, measured = topology.between, topology.measured_between
    return within + _phase(op, part, shape.nodes, link, measured, sharing, sharing)


def _phase(op: str, data: float, n: int, link: Link, measured: Measured, sharing: int, more: int) -> float:
    """Returns the time among `n` ranks.

    `sharing`: the ranks of a node that do the same at that time. `more`: how many of them do so for each one
    that was measured.
    """
    if n < 2:
        return 0.0
    shared = sharing if link.shared else 1
    if points := measured.get(op, {}).get(n):
        return interpolated(points, data * (more if link.shared else 1))
    rate = link.bandwidth / shared
    steps, levels = n - 1, math.ceil(math.log2(n))
    if op == "barrier":
        return levels * link.latency
    if op == "all_reduce":
        ring = 2 * steps * link.latency + 2 * data * steps / n / rate
        return min(ring, levels * (link.latency + data / rate))
    if op in _REDUCES:
        return levels * link.latency + data / rate
    return min(steps, 2 * levels) * link.latency + data * steps / n / rate


def interpolated(points: Sequence[tuple[float, float]], data: float) -> float:
    """Returns the time for `data` bytes between measured points; beyond them it grows in proportion."""
    at = bisect_left(points, (data,))
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1] * max(1.0, data / max(1.0, points[-1][0]))
    (a, t), (b, u) = points[at - 1], points[at]
    if a <= 0:
        return t + (u - t) * data / b
    share = math.log(data / a) / math.log(b / a)
    return float(t * (u / t) ** share)
