"""Slices that overlap in time, put onto tracks beside each other."""

from __future__ import annotations

import numpy as np

from .table import Column


def side_by_side(begin: Column, end: Column) -> Column:
    """Returns, for slices sorted by `begin`, the first track on which each overlaps no earlier one."""
    until = np.maximum(end, begin + 1)
    if (begin[1:] >= np.maximum.accumulate(until)[:-1]).all():
        return np.zeros(len(begin), np.int64)
    free: list[int] = []  # when each track is free again
    out = []
    for b, e in zip(begin.tolist(), until.tolist(), strict=True):
        at = next((i for i, last in enumerate(free) if last <= b), len(free))
        if at == len(free):
            free.append(0)
        free[at] = e
        out.append(at)
    return np.asarray(out, np.int64)
