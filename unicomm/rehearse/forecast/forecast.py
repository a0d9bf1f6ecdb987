"""The forecast: figures of a timeline, for each step of the optimizer."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from .timeline import Flight, RankTime, Timeline


@dataclass(frozen=True)
class Traffic:
    """The communication of a rank in one kind of group, in a step on average over its ranks.

    Attributes:
        groups: the name of the group, or of several groups that differ in their ranks only.
        size: ranks of a group. operations, bytes: of a rank in a step. seconds: in which they run.
    """

    groups: str
    size: int
    operations: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """A forecast.

    Attributes:
        topology: its name. ranks: of the job. steps: how many are compared; the first optimizer step of a
            rank is left out, as it warms up. With fewer than two, the whole program counts as one step.
        step: seconds of the median step, on average over the ranks.
        compute: of them, those in which a rank computes.
        exposed, hidden: seconds of communication in which a rank waits, and in which it computes meanwhile.
        peak_bytes: the most bytes of tensors in unfinished operations of one rank at a time.
        traffic: by group, most bytes first.
    """

    topology: str
    ranks: int
    steps: int
    step: float
    compute: float
    exposed: float
    hidden: float
    peak_bytes: float
    traffic: Sequence[Traffic]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def forecast(timeline: Timeline) -> Forecast:
    """Returns the figures of a timeline. Plays it."""
    table, times = timeline.table, timeline.run()
    windows = [_windows(one) for one in times.values()]
    flying = [_merged(one.flights) for one in times.values()]
    figures = []
    for step in zip(*windows, strict=False):
        each = [
            (window[1] - window[0], _overlap(one.exposed, window), _overlap(spans, window))
            for one, spans, window in zip(times.values(), flying, step, strict=True)
        ]
        figures.append(tuple(statistics.mean(column) for column in zip(*each, strict=True)))
    whole = {rank: (steps[0][0], steps[-1][1]) for rank, steps in zip(times, windows, strict=True)}
    length, exposed, under_way = sorted(figures)[len(figures) // 2] if figures else (0.0, 0.0, 0.0)
    return Forecast(
        timeline.topology.name,
        len(table.ranks),
        len(figures),
        length,
        length - exposed,
        exposed,
        max(0.0, under_way - exposed),
        max((_peak(one.flights, timeline.bytes) for one in times.values()), default=0.0),
        _traffic(timeline, times, whole, len(figures)),
    )


def _windows(one: RankTime) -> list[tuple[float, float]]:
    """Returns the times of each step of a rank but the first, or of all of it."""
    return list(pairwise(one.steps)) if len(one.steps) > 1 else [(0.0, one.end)]


def _overlap(spans: Sequence[tuple[float, float]], window: tuple[float, float]) -> float:
    begin, end = window
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


def _merged(flights: Sequence[Flight]) -> list[tuple[float, float]]:
    """Returns the spans in which at least one operation runs, from the arrival of its rank."""
    out: list[tuple[float, float]] = []
    for a, b in sorted((one.ready, one.end) for one in flights if one.end >= 0):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], b))
        else:
            out.append((a, b))
    return out


def _peak(flights: Sequence[Flight], size: Sequence[float]) -> float:
    """Returns the most bytes of operations that are under way at one time."""
    changes = [(one.ready, size[one.row]) for one in flights if one.end >= 0]
    changes += [(one.end, -size[one.row]) for one in flights if one.end >= 0]
    most = now = 0.0
    for _, change in sorted(changes, key=lambda one: (one[0], -one[1])):
        now += change
        most = max(most, now)
    return most


def _traffic(
    timeline: Timeline,
    times: Mapping[int, RankTime],
    windows: Mapping[int, tuple[float, float]],
    steps: int,
) -> list[Traffic]:
    n = len(times) * max(steps, 1)
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank, one in times.items():
        begin, end = windows[rank]
        for flight in one.flights:
            if begin <= flight.ready <= end and flight.end >= 0:
                group = timeline.table.groups[timeline.group[flight.row]]
                total = sums[group.name.partition(" (")[0], group.size]
                for i, value in enumerate((1.0, timeline.bytes[flight.row], flight.end - flight.begin)):
                    total[i] += value
    found = [Traffic(name, size, *(value / n for value in total)) for (name, size), total in sums.items()]
    return sorted(found, key=lambda one: -one.bytes)
