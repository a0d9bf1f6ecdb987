"""Slices that overlap in time, put onto tracks beside each other."""

from __future__ import annotations

import heapq

import numpy as np

from .table import Column


def side_by_side(begin: Column, end: Column) -> Column:
    """Returns, for slices sorted by `begin`, the first track on which each overlaps no earlier one."""
    until = np.maximum(end, begin + 1)
    if (begin[1:] >= np.maximum.accumulate(until)[:-1]).all():
        return np.zeros(len(begin), np.int64)
    free: list[int] = []  # tracks, the first one on top
    taken: list[tuple[int, int]] = []  # until when each other track is, the earliest on top
    out = []
    for b, e in zip(begin.tolist(), until.tolist(), strict=True):
        while taken and taken[0][0] <= b:
            heapq.heappush(free, heapq.heappop(taken)[1])
        at = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (e, at))
        out.append(at)
    return np.asarray(out, np.int64)
