"""Who waits for whom: the wait-for graph of unfinished operations, its cycles and its ends.

A node is a rank or a stuck collective. A rank points to the collectives it is in; a collective points to the
members that have not come; a rank in an unmatched send or receive points to its peer. Whoever is pointed to
and points to nobody is to blame: nobody else is. A collective points to the collective before it of its group
instead of to the ranks in it, which keeps the graph linear in the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table.table import Column, Table

from .matching import Messages

WaitNode = tuple[int, ...]  # (rank,) or (group, seq)


@dataclass
class StuckCollective:
    """A collective that some ranks are in and that is not over for them.

    Attributes:
        waiting: unfinished row of each rank in it.
        missing: members that have not come to it but to the stuck ones before it.
        unknown: members of which nothing is known: no source, or overwritten. Only in a group's first one.
        gone: members that are in it, but are dead or stopped.
        earlier: the one before, if members are missing from it, and so from this one too.
    """

    group: int
    seq: int
    waiting: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    earlier: StuckCollective | None = None

    @property
    def node(self) -> WaitNode:
        return (self.group, self.seq)


@dataclass
class WaitGraph:
    """The graph.

    Attributes:
        stuck: by (group, seq).
        lonely: rows of unfinished sends and receives whose other side is not there, by rank.
        paired: rows of unfinished sends and receives whose other side is there, by rank.
        edges: from each node; reverse: to each node.
        waiting: ranks with an unfinished operation.
    """

    stuck: dict[WaitNode, StuckCollective] = field(default_factory=dict)
    lonely: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    paired: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    edges: dict[WaitNode, list[WaitNode]] = field(default_factory=lambda: defaultdict(list))
    reverse: dict[WaitNode, list[WaitNode]] = field(default_factory=lambda: defaultdict(list))
    waiting: set[int] = field(default_factory=set)

    def add(self, a: WaitNode, b: WaitNode) -> None:
        self.edges[a].append(b)
        self.reverse[b].append(a)

    def upstream(self, start: Iterable[WaitNode]) -> set[WaitNode]:
        """All nodes from which one of `start` is reached, with `start`."""
        seen = set(start)
        todo = list(seen)
        while todo:
            for node in self.reverse.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return seen

    def victims(self, start: Iterable[WaitNode], but: Collection[int] = ()) -> list[int]:
        """Ranks that wait, directly or not, for one of `start`."""
        excluded = set(but)
        return sorted(n[0] for n in self.upstream(start) if len(n) == 1 and n[0] not in excluded)


def pending_rows(table: Table, stuck_after_ns: int, always: bool = False) -> tuple[Column, set[int]]:
    """Rows that are not over, and the ranks for which that has lasted.

    What a running process began less than `stuck_after_ns` ago has not lasted. Where nothing has, there are
    no rows (unless `always`); else the young ones are there too, as they tell where their ranks are.
    """
    rows = np.flatnonzero(table.state != State.COMPLETED)
    if not len(rows):
        return rows, set()
    now = np.zeros(int(table.rank[rows].max()) + 1, np.int64)
    for source in table.sources:
        if source.rank < len(now):
            now[source.rank] = source.as_of_ns
    as_of = now[table.rank[rows]]
    failed = table.state[rows] == State.FAILED
    old = (as_of == 0) | failed | (as_of - table.created_ns[rows] >= stuck_after_ns)
    ranks = {int(r) for r in table.rank[rows[old]]}
    return (rows if ranks or always else rows[:0]), ranks


def build_wait_graph(
    table: Table, found: Messages, pending: Iterable[int], gone: Collection[int]
) -> WaitGraph:
    """The graph of unfinished operations. `gone` are ranks that are dead or stopped: they wait for nobody."""
    waits = WaitGraph()
    rows = np.asarray(pending, np.int64)
    kinds = table.calls.kind[table.call[rows]]
    oldest: dict[tuple[int, int], int] = {}
    for row, kind in zip(rows.tolist(), kinds.tolist(), strict=True):
        if kind == OpKind.COLLECTIVE and table.group[row] >= 0:
            oldest.setdefault((int(table.rank[row]), int(table.group[row])), row)
    for (rank, group), row in oldest.items():
        seq = int(table.seq[row])
        one = waits.stuck.get((group, seq))
        if one is None:
            one = waits.stuck[group, seq] = StuckCollective(group, seq)
        one.waiting[rank] = row
        waits.waiting.add(rank)
    _connect_collectives(table, waits, set(gone))
    _connect_messages(table, waits, found, rows, set(gone))
    return waits


def _connect_collectives(table: Table, waits: WaitGraph, gone: set[int]) -> None:
    by_group: dict[int, list[StuckCollective]] = defaultdict(list)
    for one in waits.stuck.values():
        by_group[one.group].append(one)
    for group, several in by_group.items():
        several.sort(key=lambda s: s.seq)
        numbers = [one.seq for one in several]
        reached, unknown = _progress(table, group)
        for rank, seq in reached.items():
            at = bisect_right(numbers, seq)  # the first one that it has not come to
            if at < len(several):
                several[at].missing.append(rank)
        several[0].unknown = unknown
        behind = False  # whether ranks are missing from an earlier one, and so from this one too
        for i, one in enumerate(several):
            one.gone = [rank for rank in one.waiting if rank in gone]
            if behind:
                one.earlier = several[i - 1]
                waits.add(one.node, one.earlier.node)
            for rank in one.waiting:
                if rank not in gone:
                    waits.add((rank,), one.node)
            absent = [*one.missing, *one.gone]
            # Where somebody is known not to have come, those of whom nothing is known are not suspected.
            for rank in absent or ([] if behind else one.unknown):
                waits.add(one.node, (rank,))
            behind = behind or bool(absent)


def _progress(table: Table, group: int) -> tuple[dict[int, int], list[int]]:
    """How far each member has come in a group, and the members of which that is not known."""
    reached: dict[int, int] = {}
    unknown: list[int] = []
    for rank in table.groups[group].ranks.tolist():
        source = table.source_of.get(rank)
        if source is None or (source.wrapped and group not in source.created):
            unknown.append(rank)
        else:
            reached[rank] = source.created.get(group, 0)
    return reached, unknown


def _connect_messages(
    table: Table, waits: WaitGraph, found: Messages, rows: Iterable[int], gone: set[int]
) -> None:
    if not len(found.rows):
        return
    here = np.isin(found.rows, np.asarray(rows, np.int64))
    for i in np.flatnonzero(here).tolist():
        row, partner = int(found.rows[i]), int(found.partner[i])
        rank, peer = int(table.rank[row]), int(table.peer[row])
        waits.waiting.add(rank)
        if partner >= 0:
            waits.paired[rank].append(row)
        else:
            waits.lonely[rank].append(row)
        if rank not in gone and (partner < 0 or peer in gone):
            waits.add((rank,), (peer,))


def components(waits: WaitGraph) -> list[list[WaitNode]]:
    """Strongly connected components (Tarjan), each before those that point to it."""
    index: dict[WaitNode, int] = {}
    low: dict[WaitNode, int] = {}
    stack: list[WaitNode] = []
    inside: set[WaitNode] = set()
    out: list[list[WaitNode]] = []
    for root in list(waits.edges):
        if root in index:
            continue
        work: list[tuple[WaitNode, int]] = [(root, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                inside.add(node)
            descended = False
            following = waits.edges.get(node, ())
            for i in range(at, len(following)):
                other = following[i]
                if other not in index:
                    work.append((node, i + 1))
                    work.append((other, 0))
                    descended = True
                    break
                if other in inside:
                    low[node] = min(low[node], index[other])
            if descended:
                continue
            if low[node] == index[node]:
                component = []
                while True:
                    other = stack.pop()
                    inside.discard(other)
                    component.append(other)
                    if other == node:
                        break
                out.append(component)
            if work:
                parent = work[-1][0]
                low[parent] = min(low[parent], low[node])
    return out


def shortest_cycle(waits: WaitGraph, component: Collection[WaitNode], tries: int = 64) -> list[WaitNode]:
    """The nodes of a short cycle in a component, in order, beginning with a rank."""
    inside = set(component)
    best: list[WaitNode] = []
    starts = sorted(n for n in inside if len(n) == 1)[:tries]
    for start in starts:
        came: dict[WaitNode, WaitNode] = {}
        layer: list[WaitNode] = [start]
        closed: WaitNode | None = None
        while layer and closed is None:
            following: list[WaitNode] = []
            for node in layer:
                for other in waits.edges.get(node, ()):
                    if other == start:
                        closed = node
                        break
                    if other in inside and other not in came:
                        came[other] = node
                        following.append(other)
                if closed is not None:
                    break
            layer = following
        if closed is None:
            continue
        path: list[WaitNode] = [closed]
        while path[-1] != start:
            path.append(came[path[-1]])
        path.reverse()
        if not best or len(path) < len(best):
            best = path
    return best
