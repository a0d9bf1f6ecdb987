"""What a merged trace shows of the operations: their tracks, their slices and the flows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats.byte_columns import Part, alike, records

from .operation_columns import Column, Joined, Operations, lanes
from .records import PREFIX

AT_ONCE = 1 << 15  # rows that are put into bytes together


@dataclass
class Slices:
    """Operations on the tracks of a rank's communicators, in the order of their arrival; a column each.

    Attributes:
        row: among the rank's rows; track: the number of the track.
        begin, ready, end: in nanoseconds since 1970, aligned.
        flow: of its collective, 0 for none; place: 0, 1 or 2 for the first, a middle and the last rank in it.
        issue: number of the flow from where it was issued, 0 for none.
    """

    row: Column
    track: Column
    begin: Column
    ready: Column
    end: Column
    flow: Column
    place: Column
    issue: Column


class RankRows:
    """The rows of one rank, numbered from 0; columns as in `Operations`.

    Attributes:
        shared, shared_of: arguments that many rows have alike, and which of these each row has.
        before: nanoseconds from its issue to its start.
        names: as the events are called; `names_of` and `later` (asynchronous) as lists, quicker to look into.
        placed: whether it is shown; see `Operations.placed`.
    """

    def __init__(self, found: Operations, first: int, count: int) -> None:
        part = slice(first, first + count)
        self.first, self.count = first, count
        self.seq, self.bytes, self.elements = found.seq[part], found.bytes[part], found.elements[part]
        self.root, self.peer, self.completed = (
            found.root[part],
            found.peer[part],
            found.completed_ns[part] > 0,
        )
        self.before = (found.arrived_ns - found.issued_ns)[part]
        self.traced, self.thread, self.op = found.traced[part], found.thread[part], found.op[part]
        self.replay, self.captured_seq = found.replay[part], found.captured_seq[part]
        self.placed = found.placed[part]
        self.names = [PREFIX + op for op in found.ops]
        self.names_of: list[str] = [self.names[op] for op in self.op.tolist()]
        self.later: list[bool] = found.is_async[part].tolist()
        numbers: dict[tuple[int, int, bool, bool], int] = {}
        replayed = (self.replay != 0).tolist()
        same = zip(found.group[part].tolist(), found.dtype[part].tolist(), self.later, replayed, strict=True)
        self.shared_of = np.asarray([numbers.setdefault(one, len(numbers)) for one in same], np.int64)
        # What an event has with `record_shapes=True`, for those without.
        self.shared: list[dict[str, Any]] = [
            {
                "comm": found.groups[group].name,
                "comm_uid": found.groups[group].uid,
                "dtype": found.dtypes[dtype],
                "is_async": later,
            }
            for group, dtype, later, _ in numbers
        ]


class Labels:
    """What stands in the arguments of each row's event, put into bytes when it is first asked for."""

    def __init__(self, own: RankRows, describe: Callable[[Column, int], list[Part]]) -> None:
        """`describe` gives the parts for rows that have the same shared arguments."""
        self._own = own
        self._describe = describe
        self._first = 0
        self._made: list[bytes] = []

    def __getitem__(self, row: int) -> bytes:
        if not self._first <= row < self._first + len(self._made):
            self._make(row - row % AT_ONCE)  # events come in about the order of their rows
        return self._made[row - self._first]

    def _make(self, first: int) -> None:
        shared = self._own.shared_of[first : first + AT_ONCE]
        self._first, self._made = first, [b""] * len(shared)
        for at in alike(shared):
            made = records(len(at), *self._describe(at + first, int(shared[at[0]])))
            for place, one in zip(at.tolist(), made, strict=True):
                self._made[place] = one


def flows(found: Operations, joined: Joined) -> tuple[Column, Column, int]:
    """The number of the flow of each row (0: none), its place in it, and how many flows there are."""
    n = len(found)
    number, place = np.zeros(n, np.int64), np.zeros(n, np.uint8)
    rows = np.flatnonzero((joined.members > 1) & found.placed)
    if not len(rows):
        return number, place, 0
    order = rows[np.lexsort((found.rank[rows], joined.begin[rows], found.cell[rows]))]
    cells = found.cell[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = cells[1:] != cells[:-1]
    last = np.ones(len(order), np.bool_)
    last[:-1] = first[1:]
    number[order] = np.cumsum(first)
    place[order] = np.where(first, 0, np.where(last, 2, 1))
    return number, place, int(first.sum())


def tracks(found: Operations, joined: Joined, own: RankRows) -> tuple[list[str], Column]:
    """Names of a rank's tracks, and the track of each of its rows; operations that overlap get several."""
    names: list[str] = []
    rows = np.arange(own.first, own.first + own.count)
    track_of = np.zeros(own.count, np.int64)
    # A group's operations of several ranks in one trace (threads) overlap too.
    rows = rows[own.placed]
    for group in np.unique(found.group[rows]).tolist():
        mine = rows[found.group[rows] == group]
        mine = mine[np.argsort(joined.begin[mine], kind="stable")]
        lane_of = lanes(joined.begin[mine], joined.end[mine])
        track_of[mine - own.first] = lane_of + len(names)
        name = f"unicomm: {found.groups[group].description or found.groups[group].name}"
        names += [name, *(f"{name} (at the same time, {i})" for i in range(1, int(lane_of.max()) + 1))]
    return names, track_of


def slices(
    joined: Joined, own: RankRows, track_of: Column, number: Column, place: Column, issues: Mapping[int, int]
) -> Iterator[Slices]:
    """A rank's operations, some at a time; of those on one track each ends before the next one begins."""
    part = slice(own.first, own.first + own.count)
    order = np.argsort(joined.begin[part], kind="stable")
    order = order[own.placed[order]]
    issue = np.zeros(own.count, np.int64)
    issue[list(issues.keys())] = list(issues.values())
    begin, ready, end = joined.begin[part], joined.ready[part], joined.end[part]
    for first in range(0, len(order), AT_ONCE):
        rows = order[first : first + AT_ONCE]
        flow = (number[part][rows], place[part][rows], issue[rows])
        yield Slices(rows, track_of[rows], begin[rows], ready[rows], end[rows], *flow)
