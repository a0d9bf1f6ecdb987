"""Circles of ranks that wait for each other, found from what all of them say at a deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def find_circle(waits: Mapping[int, Sequence[int]], start: int) -> list[int]:
    """Returns a circle that the waits of `start` lead to, each rank before one it waits for; [] if none.

    `waits`: for each rank that waits, the ranks without which it cannot go on.
    """
    done: set[int] = set()
    way = [start]
    ways = [iter(waits.get(start, ()))]
    while way:
        to = next(ways[-1], None)
        if to is None:
            ways.pop()
            done.add(way.pop())
        elif to in way:
            circle = way[way.index(to) :]
            first = circle.index(min(circle))  # the same order whichever rank has found it
            return circle[first:] + circle[:first]
        elif to not in done:
            way.append(to)
            ways.append(iter(waits.get(to, ())))
    return []
