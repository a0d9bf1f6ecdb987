"""The operations in a merged trace: their tracks, their slices and the flows between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats.byte_columns import Part, records
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.table.table import Column
from unicomm.flight_recorder.table.tracks import side_by_side
from unicomm.flight_recorder.texts import format_ranks

from .operation_columns import GroupOf, Joined, Operations, alike
from .records import PREFIX

AT_ONCE = 1 << 15  # rows that are turned into bytes together


@dataclass
class Slices:
    """Operations on the tracks of a rank's communicators, in the order of their arrival; a column each.

    Attributes:
        row: the position among the rank's rows; track: the number of the track.
        begin, ready, end: nanoseconds since 1970, on the aligned clock.
        flow: the number of its collective's or message's flow, 0 for none; place: 0, 1 or 2 for the first, a
            middle and the last rank in it; flow_at: when the flow is there.
        issue: the number of the flow that begins where the operation was issued, 0 for none.
    """

    row: Column
    track: Column
    begin: Column
    ready: Column
    end: Column
    flow: Column
    place: Column
    flow_at: Column
    issue: Column


class RankRows:
    """The rows of one rank, numbered from 0; columns as in `Operations`.

    Attributes:
        shared, shared_of: arguments that many rows have in common, and the index of each row's entry.
        before: nanoseconds from the operation's issue to its start.
        names: the name of the events of each operation; `names_of` (by row) and `later` (asynchronous, by
            row) are lists, because lists are faster to look into.
        placed: whether the row is shown; see `Operations.placed`.
        collective, receives: whether it is a collective, or a receive.
    """

    def __init__(self, found: Operations, first: int, count: int) -> None:
        part = slice(first, first + count)
        self.first, self.count = first, count
        self.seq, self.bytes, self.elements = found.seq[part], found.bytes[part], found.elements[part]
        self.root, self.peer = found.root[part], found.peer[part]
        self.completed = found.completed_ns[part] > 0
        self.before = (found.arrived_ns - found.issued_ns)[part]
        self.traced, self.thread, self.op = found.traced[part], found.thread[part], found.op[part]
        self.replay, self.captured_seq = found.replay[part], found.captured_seq[part]
        self.placed = found.placed[part]
        self.collective = found.kind[part] == OpKind.COLLECTIVE
        self.receives = found.kind[part] == OpKind.RECV
        self.names = [PREFIX + op for op in found.ops]
        self.names_of: list[str] = [self.names[op] for op in self.op.tolist()]
        self.later: list[bool] = found.is_async[part].tolist()
        numbers: dict[tuple[int, int, bool, bool], int] = {}
        replayed = (self.replay != 0).tolist()
        same = zip(found.group[part].tolist(), found.dtype[part].tolist(), self.later, replayed, strict=True)
        self.shared_of = np.asarray([numbers.setdefault(one, len(numbers)) for one in same], np.int64)
        # The arguments that an event has with `record_shapes=True`, for events that were recorded without.
        self.shared: list[dict[str, Any]] = [
            {
                "comm": found.groups[group].name,
                "comm_uid": found.groups[group].uid,
                **_described(found.groups[group]),
                "dtype": found.dtypes[dtype],
                "is_async": later,
            }
            for group, dtype, later, _ in numbers
        ]


def _described(group: GroupOf) -> dict[str, str]:
    facts = {"group_description": group.description, "group_ranks": format_ranks(group.ranks)}
    return {name: text for name, text in facts.items() if text}


class Labels:
    """The arguments of each row's event as bytes, made when they are first asked for."""

    def __init__(self, own: RankRows, describe: Callable[[Column, int], list[Part]]) -> None:
        """`describe` returns the parts for rows that have the same shared arguments."""
        self._own = own
        self._describe = describe
        self._first = 0
        self._made: list[bytes] = []

    def __getitem__(self, row: int) -> bytes:
        if not self._first <= row < self._first + len(self._made):
            self._make(row - row % AT_ONCE)  # events come roughly in the order of their rows
        return self._made[row - self._first]

    def _make(self, first: int) -> None:
        shared = self._own.shared_of[first : first + AT_ONCE]
        self._first, self._made = first, [b""] * len(shared)
        for at in alike(shared):
            made = records(len(at), *self._describe(at + first, int(shared[at[0]])))
            for place, one in zip(at.tolist(), made, strict=True):
                self._made[place] = one


def flows(found: Operations, joined: Joined) -> tuple[Column, Column, int]:
    """Returns the number of each row's flow (0: none), its place in the flow, and the number of flows.

    The flow of a collective goes through its ranks in the order in which they arrived, that of a message from
    its send to its receive, which may have begun earlier.
    """
    n = len(found)
    number, place = np.zeros(n, np.int64), np.zeros(n, np.uint8)
    rows = np.flatnonzero((joined.members > 1) & found.placed)
    if not len(rows):
        return number, place, 0
    receives = found.kind[rows] == OpKind.RECV
    order = rows[np.lexsort((found.rank[rows], joined.begin[rows], receives, found.cell[rows]))]
    cells = found.cell[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = cells[1:] != cells[:-1]
    last = np.ones(len(order), np.bool_)
    last[:-1] = first[1:]
    number[order] = np.cumsum(first)
    place[order] = np.where(first, 0, np.where(last, 2, 1))
    return number, place, int(first.sum())


def tracks(found: Operations, joined: Joined, own: RankRows) -> tuple[list[str], Column]:
    """Returns the names of a rank's tracks, and the track of each of its rows.

    Operations of one communicator that overlap are on tracks beside each other. Those of several ranks that
    are threads, and therefore in one trace, overlap too.
    """
    names: list[str] = []
    rows = np.arange(own.first, own.first + own.count)
    track_of = np.zeros(own.count, np.int64)
    rows = rows[own.placed]
    for group in np.unique(found.group[rows]).tolist():
        mine = rows[found.group[rows] == group]
        mine = mine[np.argsort(joined.begin[mine], kind="stable")]
        beside = side_by_side(joined.begin[mine], joined.end[mine])
        track_of[mine - own.first] = beside + len(names)
        name = f"unicomm: {found.groups[group].name}"
        names += [name, *(f"{name} (at the same time, {i})" for i in range(1, int(beside.max()) + 1))]
    return names, track_of


def slices(
    joined: Joined, own: RankRows, track_of: Column, number: Column, place: Column, issues: Mapping[int, int]
) -> Iterator[Slices]:
    """Yields a rank's operations, `AT_ONCE` at a time; on one track each ends before the next begins."""
    part = slice(own.first, own.first + own.count)
    order = np.argsort(joined.begin[part], kind="stable")
    order = order[own.placed[order]]
    issue = np.zeros(own.count, np.int64)
    issue[list(issues.keys())] = list(issues.values())
    begin, ready, end = joined.begin[part], joined.ready[part], joined.end[part]
    # Viewers draw a flow in the order of time, so it reaches a receive when it is sent, or just after that.
    flow_at = np.where(own.receives, np.clip(ready + 1, begin, end), begin)
    for first in range(0, len(order), AT_ONCE):
        rows = order[first : first + AT_ONCE]
        flow = (number[part][rows], place[part][rows], flow_at[rows], issue[rows])
        yield Slices(rows, track_of[rows], begin[rows], ready[rows], end[rows], *flow)


def as_bytes(made: Slices, own: RankRows, records_of: Callable[[Slices, Column], list[bytes]]) -> list[bytes]:
    """Returns the bytes of each slice.

    `records_of` makes those of several slices that have the same form: the same operation and arguments, and
    the same parts.
    """
    row = made.row
    out: list[bytes] = [b""] * len(row)
    waits, runs = made.ready > made.begin, made.end > made.ready
    kinds = (own.op[row], own.shared_of[row], own.completed[row], own.root[row] >= 0, own.peer[row] >= 0)
    for at in alike(made.track, waits, runs, made.flow > 0, made.place, made.issue > 0, *kinds):
        for i, data in zip(at.tolist(), records_of(made, at), strict=True):
            out[i] = data
    return out
