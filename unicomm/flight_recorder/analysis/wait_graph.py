"""The wait-for graph of unfinished operations, its strongly connected components and its cycles.

A node is a rank or a stuck collective. A rank has edges to the collectives it is in. A collective has edges
to the members that have not joined, and to those that have issued it behind another operation, which has
started: they join when that one is over. A rank in an unmatched send or receive has an edge to its peer, and
so has one whose peer has its side queued in this way. Culprits are the nodes with incoming and without
outgoing edges, and the cycles. A collective has one edge to the previous stuck collective of its group,
instead of edges to the ranks in that one, so that the size of the graph is linear in the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import ASYNC, State
from unicomm.flight_recorder.table.table import RUNNING, Column, Source, Table

from .matching import Messages

WaitNode = tuple[int, ...]  # (rank,) or (group, seq)


@dataclass
class StuckCollective:
    """A collective that is unfinished on some ranks.

    Attributes:
        waiting: the unfinished row of each rank in it.
        missing: the members that have joined the earlier stuck collectives of the group, but not this one.
        unknown: the members whose progress is unknown: without a source, with overwritten records, or with a
            newer process. Only the first stuck collective of a group lists them.
        gone: the members that are in it, but dead or stopped.
        queued: the members that have issued it behind another operation that has started there, which
            therefore have not joined it yet; the value is the row of that other operation.
    """

    group: int
    seq: int
    waiting: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    queued: dict[int, int] = field(default_factory=dict)

    @property
    def node(self) -> WaitNode:
        return (self.group, self.seq)


@dataclass
class WaitGraph:
    """The wait-for graph.

    Attributes:
        stuck: the stuck collectives, by (group, seq).
        lonely: the rows of unfinished sends and receives without the other side, by rank.
        paired: the rows of unfinished sends and receives with the other side, by rank.
        edges: the successors of each node.
        reverse: the predecessors of each node.
        waiting: the ranks with an unfinished operation.
        queueing: the ranks with an operation that is queued behind an unfinished one.
    """

    stuck: dict[WaitNode, StuckCollective] = field(default_factory=dict)
    lonely: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    paired: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    edges: dict[WaitNode, list[WaitNode]] = field(default_factory=lambda: defaultdict(list))
    reverse: dict[WaitNode, list[WaitNode]] = field(default_factory=lambda: defaultdict(list))
    waiting: set[int] = field(default_factory=set)
    queueing: set[int] = field(default_factory=set)

    def add(self, a: WaitNode, b: WaitNode) -> None:
        """Adds an edge: `a` waits for `b`."""
        self.edges[a].append(b)
        self.reverse[b].append(a)

    def victims(self, start: Iterable[WaitNode], but: Collection[int] = ()) -> list[int]:
        """Returns the sorted ranks, without `but`, that wait directly or indirectly for a node of `start`."""
        seen = set(start)
        todo = list(seen)
        while todo:
            for node in self.reverse.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        excluded = set(but)
        return sorted(n[0] for n in seen if len(n) == 1 and n[0] not in excluded)


def lasting_failures(table: Table) -> Column:
    """Returns the failed rows behind which their thread issued nothing more: its rank did not survive them.

    A rank that catches an error and goes on, with other communicators or after a reconfiguration, waits where
    it is now. One that ended because of an error waited in what had failed last.
    """
    failed = np.flatnonzero(table.state == State.FAILED)
    if not len(failed):
        return failed
    rank, created, over = table.rank[failed], table.created_ns[failed], table.completed_ns[failed]
    behind = _newest_of_thread(table, failed)
    raised = [e.rank for e in table.endings if e.raised is not None and e.raised.consequence]
    if raised:
        order = np.lexsort((over, rank))
        last = order[np.append(rank[order][1:] != rank[order][:-1], True)]  # of each rank
        ended_in = np.zeros(int(rank.max()) + 1, np.int64)
        ended_in[rank[last]] = created[last]
        of_raised = np.isin(rank, raised)
        behind[of_raised] = ended_in[rank[of_raised]]
    lasting: Column = failed[(over == 0) | (behind <= over)]
    return lasting


def _newest_of_thread(table: Table, rows: Column) -> Column:
    """Returns for each of `rows` when its thread issued its newest operation."""
    newest = np.zeros(len(rows), np.int64)
    where = np.searchsorted(rows, [(s.begin, s.end) for s in table.sources]).reshape(-1, 2)
    for source, (begin, end) in zip(table.sources, where.tolist(), strict=True):
        if begin < end:
            thread, created = (c[source.begin : source.end] for c in (table.thread, table.created_ns))
            first = int(thread.min())
            of_thread = np.zeros(int(thread.max()) - first + 1, np.int64)
            np.maximum.at(of_thread, thread - first, created)
            newest[begin:end] = of_thread[table.thread[rows[begin:end]] - first]
    return newest


def pending_rows(table: Table, stuck_after_ns: int, always: bool = False) -> tuple[Column, set[int]]:
    """Returns the unfinished rows, and the ranks that have been stuck for `stuck_after_ns`.

    An operation that a running process began less than `stuck_after_ns` ago is not stuck. If no rank is
    stuck, no rows are returned (unless `always`); else all unfinished rows are, because also the young ones
    tell where their ranks are. A failure that its rank has survived is over. So is, for a rank that works, a
    receive that it has left open, as for a message that tells it to stop.
    """
    unfinished = (table.state != State.COMPLETED) & (table.state != State.FAILED)
    unfinished[lasting_failures(table)] = True
    rows = np.flatnonzero(unfinished)
    rows = rows[~_left_open(table, rows, stuck_after_ns)]
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


def _left_open(table: Table, rows: Column, stuck_after_ns: int) -> Column:
    """Returns which unfinished rows are old asynchronous receives of threads that have worked since then."""
    receives = (table.kind[rows] == OpKind.RECV) & ((table.flags[rows] & ASYNC) != 0)
    left_open = np.zeros(len(rows), np.bool_)
    threads = np.stack([table.rank[rows[receives]], table.thread[rows[receives]]], axis=1)
    for rank, thread in np.unique(threads, axis=0).tolist():
        source = table.source_of[rank]
        if source.process != RUNNING or not source.as_of_ns:
            continue
        here = np.flatnonzero(table.thread[source.begin : source.end] == thread) + source.begin
        newest = max(int(table.created_ns[here].max()), int(table.completed_ns[here].max()))
        old = newest - table.created_ns[rows] >= stuck_after_ns
        if source.as_of_ns - newest < stuck_after_ns:
            left_open |= receives & (table.rank[rows] == rank) & (table.thread[rows] == thread) & old
    return left_open


def build_wait_graph(
    table: Table, found: Messages, pending: Iterable[int], gone: Collection[int]
) -> WaitGraph:
    """Builds the wait-for graph of the rows `pending`.

    The ranks `gone` are dead or stopped: they do not wait.
    """
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
    queued = _queued(table, rows)
    waits.queueing = {int(table.rank[row]) for row in queued}
    for one in waits.stuck.values():
        one.queued = {rank: queued[row] for rank, row in one.waiting.items() if row in queued}
    _connect_collectives(table, waits, set(gone))
    _connect_messages(table, waits, found, rows, set(gone), queued)
    return waits


def _queued(table: Table, rows: Column) -> dict[int, int]:
    """Returns the rows that have not started, behind an earlier row of their rank that has.

    The keys are the rows, the values the first such earlier row. Streams, devices and progress threads run
    operations one after another, also those of several groups. Where no operation counts as started, as in
    the dumps of torch's gloo, nothing is known about that. A row that started when the earlier one had failed
    was queued, too: it has failed at once.
    """
    first: dict[int, int] = {}
    out = {}
    facts = (table.rank, table.state, table.created_ns, table.started_ns)
    columns = (column[rows].tolist() for column in facts)
    for row, rank, state, created, started in zip(rows.tolist(), *columns, strict=True):
        at = first.get(rank)
        if state == State.STARTED or (state == State.FAILED and started > 0):
            if at is None:
                first[rank] = row
                continue
            ended = int(table.completed_ns[at]) if table.state[at] == State.FAILED else 0
            if state == State.FAILED and created < ended <= started:
                out[row] = at
        elif at is not None:
            out[row] = at
    return out


def _connect_collectives(table: Table, waits: WaitGraph, gone: set[int]) -> None:
    by_group: dict[int, list[StuckCollective]] = defaultdict(list)
    for one in waits.stuck.values():
        by_group[one.group].append(one)
    for group, several in by_group.items():
        several.sort(key=lambda s: s.seq)
        numbers = [one.seq for one in several]
        reached, unknown = _progress(table, group)
        for rank, seq in reached.items():
            at = bisect_right(numbers, seq)  # the first one that the rank has not joined
            if at < len(several):
                several[at].missing.append(rank)
        several[0].unknown = unknown
        behind = False  # whether ranks are missing from an earlier one, and so from this one
        for i, one in enumerate(several):
            one.gone = [rank for rank in one.waiting if rank in gone]
            if behind:
                waits.add(one.node, several[i - 1].node)
            for rank in one.waiting:
                if rank not in gone and rank not in one.queued:
                    waits.add((rank,), one.node)
            absent = [*one.missing, *one.gone, *(r for r in one.queued if r not in gone)]
            # If some ranks are known to be absent, the ranks with unknown progress are not suspected.
            for rank in absent or ([] if behind else one.unknown):
                waits.add(one.node, (rank,))
            behind = behind or bool(absent)


def _progress(table: Table, group: int) -> tuple[dict[int, int], list[int]]:
    """Returns the newest collective that each member has joined, and the members without that information."""
    reached: dict[int, int] = {}
    unknown: list[int] = []
    for rank in table.groups[group].ranks.tolist():
        source = table.source_of.get(rank)
        if source is None or (source.wrapped and group not in source.created) or newer(source, group):
            unknown.append(rank)
        else:
            reached[rank] = source.created.get(group, 0)
    return reached, unknown


def newer(source: Source, group: int) -> bool:
    """Whether the process of a member has no such communicator, though others use it: most likely it was
    started again.

    Communicators of unicomm are made by all members together, those of torch by each one when it needs them.
    """
    return source.format == "ring" and group not in source.members


def _connect_messages(
    table: Table,
    waits: WaitGraph,
    found: Messages,
    rows: Iterable[int],
    gone: set[int],
    queued: Collection[int],
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
        behind = partner in queued and row not in queued
        if rank not in gone and (partner < 0 or peer in gone or behind):
            waits.add((rank,), (peer,))


def components(waits: WaitGraph) -> list[list[WaitNode]]:
    """Returns the strongly connected components (Tarjan's algorithm), successors first."""
    index: dict[WaitNode, int] = {}
    low: dict[WaitNode, int] = {}
    stack: list[WaitNode] = []
    inside: set[WaitNode] = set()
    work: list[tuple[WaitNode, Iterator[WaitNode]]] = []  # the path to a node, each with its other successors
    out: list[list[WaitNode]] = []

    def enter(node: WaitNode) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        inside.add(node)
        work.append((node, iter(waits.edges.get(node, ()))))

    for root in list(waits.edges):
        if root not in index:
            enter(root)
        while work:
            node, following = work[-1]
            for other in following:
                if other not in index:
                    enter(other)
                    break
                if other in inside:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = [stack.pop()]
                    while component[-1] != node:
                        component.append(stack.pop())
                    inside.difference_update(component)
                    out.append(component)
    return out


def shortest_cycle(waits: WaitGraph, component: Collection[WaitNode], tries: int = 64) -> list[WaitNode]:
    """Returns the nodes of a short cycle in a component, in order, starting with a rank."""
    inside = set(component)
    starts = sorted(n for n in inside if len(n) == 1)[:tries]
    cycles = (_cycle_through(waits, inside, start) for start in starts)
    return min(filter(None, cycles), key=len, default=[])


def _cycle_through(waits: WaitGraph, inside: set[WaitNode], start: WaitNode) -> list[WaitNode]:
    """Returns the nodes of a shortest cycle through `start`, which comes first; [] if there is none."""
    came: dict[WaitNode, WaitNode] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in waits.edges.get(node, ()):
            if other == start:
                path = [node]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if other in inside and other not in came:
                came[other] = node
                queue.append(other)
    return []
