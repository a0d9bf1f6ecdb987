"""The timeline: all ranks' steps, with the time that each computes and that each operation takes.

A collective begins when its last rank has come and the one before it in its group is over; a message when
both sides are there. How long a rank computes between two operations is its processor time in the rehearsal.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind, item_size
from unicomm.flight_recorder.ring.reader import ASYNC
from unicomm.flight_recorder.table.table import Table

from ..details import STEP, Details
from .cost_model import Shape, seconds, shape_of
from .topology import Topology, slowdown

_BY_OUTPUT = ("all_gather", "all_gather_single", "all_gather_v", "gather", "gather_single")


@dataclass
class Flight:
    """An operation of a rank: its row, the rank's arrival, and its beginning and end in seconds."""

    row: int
    ready: float
    begin: float = -1.0
    end: float = -1.0


@dataclass
class RankTime:
    """What a rank does over the time, in seconds.

    Attributes:
        steps: the times at which its optimizer steps were over.
        exposed: how long it waited, at which times: (begin, end).
        flights: its operations.
        end: when its program ends.
    """

    steps: list[float] = field(default_factory=list)
    exposed: list[tuple[float, float]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    end: float = 0.0


def data_bytes(table: Table) -> list[float]:
    """Returns the bytes of each row: of the whole vector that the operation works on, as a rank sees it."""
    calls = table.calls
    item = np.asarray([item_size(name) for name in table.dtypes], float)
    sent = calls.in_numel * item[calls.in_dtype]
    taken = calls.out_numel * item[calls.out_dtype]
    gathers = np.isin(np.asarray(table.ops, object)[calls.op].astype(str), _BY_OUTPUT)
    whole = np.where(gathers, np.maximum(taken, sent), np.where(sent > 0, sent, taken))
    return np.asarray(whole[table.call], float).tolist()  # type: ignore[no-any-return]


class Timeline:
    """Plays the recorded steps with times. `details`: the ranks' notes, with their processor times.

    `partners`: by row of a message, the row of the other side. `buffered`: whether sends do not wait for it.
    """

    def __init__(
        self,
        table: Table,
        details: Mapping[int, Details],
        topology: Topology,
        per_node: int,
        partners: Mapping[int, int] | None = None,
        buffered: bool = False,
    ) -> None:
        self.table, self.details, self.topology = table, details, topology
        self.bytes = data_bytes(table)
        self.kind, self.seq, self.peer = table.kind.tolist(), table.seq.tolist(), table.peer.tolist()
        self.group, self.rank = table.group.tolist(), table.rank.tolist()
        self.is_async = ((table.flags & ASYNC) != 0).tolist()
        self.op = [table.ops[i] for i in table.calls.op[table.call].tolist()]
        self.shapes = [shape_of(group.ranks.tolist(), per_node) for group in table.groups]
        self.members = [sum(int(r) in table.source_of for r in g.ranks) for g in table.groups]
        self.per_node = per_node
        local = min(per_node, len(table.ranks))
        crowd = local / topology.cores if topology.cores else 0.0
        self.slower = slowdown(topology, local) / topology.speed
        #: The part of an operation that keeps a core from computing: all of it if each core has a rank.
        self.busy = min(1.0, crowd)
        self.of_rank = {rank: RankTime() for rank in details}
        self._clock = dict.fromkeys(details, 0.0)
        self._at = dict.fromkeys(details, 0)
        self._cpu = dict.fromkeys(details, 0)
        self._flights: dict[int, Flight] = {}
        self._here: dict[tuple[int, int], list[Flight]] = defaultdict(list)
        self._over: dict[int, float] = defaultdict(float)  # by group
        self._partners, self._buffered = partners or {}, buffered
        for row, other in self._partners.items():
            self.peer[row] = self.rank[other]  # also of a receive from any rank
        self._blocked: dict[int, list[int]] = defaultdict(list)  # by row
        self._ready = deque(sorted(details))

    @property
    def complete(self) -> bool:
        """Whether all ranks came to their ends, after `run`."""
        played = [rank for rank in self.details if rank in self.table.source_of]
        return all(self._at[rank] == len(self.details[rank].events) for rank in played)

    def run(self) -> dict[int, RankTime]:
        """Returns each rank's times. Operations that never complete end a rank's."""
        while self._ready:
            self._go_on(self._ready.popleft())
        for rank, one in self.of_rank.items():
            one.end = self._clock[rank]
        return self.of_rank

    def _go_on(self, rank: int) -> None:
        source, events = self.table.source_of.get(rank), self.details[rank].events
        if source is None:
            return
        first = source.begin - source.overwritten
        while self._at[rank] < len(events):
            what, begin, end = events[self._at[rank]]
            if self._cpu[rank] <= begin:  # not yet counted, or counted before it blocked
                self._clock[rank] += (begin - self._cpu[rank]) * 1e-9 * self.slower
                self._cpu[rank] = begin
            if what == STEP:
                self.of_rank[rank].steps.append(self._clock[rank])
            else:
                row = first + (what if what >= 0 else -1 - what)
                if row >= source.begin and not self._done(rank, row, what >= 0):
                    return
            self._cpu[rank] = end
            self._at[rank] += 1

    def _done(self, rank: int, row: int, issues: bool) -> bool:
        """Issues or awaits an operation. Returns whether the rank goes on."""
        if issues and row not in self._flights:
            flight = self._flights[row] = Flight(row, self._clock[rank])
            self.of_rank[rank].flights.append(flight)
            self._join(row, flight)
        if issues and self.is_async[row]:
            # A transport that works on the rank's own core holds up what the rank computes meanwhile.
            self._clock[rank] += self._cost(row) * self.busy * self._cpu_part(row)
            return True
        flight = self._flights[row]
        if flight.end < 0:
            self._blocked[row].append(rank)
            return False
        if flight.end > self._clock[rank]:
            self.of_rank[rank].exposed.append((self._clock[rank], flight.end))
            self._clock[rank] = flight.end
        return True

    def _join(self, row: int, flight: Flight) -> None:
        group, peer = self.group[row], self.peer[row]
        if self.kind[row] == OpKind.COLLECTIVE:
            here = self._here[group, self.seq[row]]
            here.append(flight)
            if len(here) == self.members[group]:
                begin = max(self._over[group], *(one.ready for one in here))
                self._over[group] = begin + self._cost(row)
                self._complete(here, begin, self._over[group])
        elif peer >= 0 and peer not in self.table.source_of:
            self._complete([flight], flight.ready, flight.ready + self._cost(row))
        else:
            other = self._flights.get(self._partners.get(row, -1))
            if self._buffered:
                self._join_buffered(row, flight, other)
            elif other is not None:
                begin = max(flight.ready, other.ready)
                self._complete([flight, other], begin, begin + self._cost(row))

    def _join_buffered(self, row: int, flight: Flight, other: Flight | None) -> None:
        sends = self.kind[row] == OpKind.SEND
        if sends:
            self._complete([flight], flight.ready, flight.ready + self._cost(row))
        if other is not None:
            sent, received = (flight, other) if sends else (other, flight)
            self._complete([received], max(sent.begin, received.ready), max(sent.end, received.ready))

    def _complete(self, flights: list[Flight], begin: float, end: float) -> None:
        for one in flights:
            one.begin, one.end = begin, end
            self._ready.extend(self._blocked.pop(one.row, ()))

    def _shape(self, row: int) -> Shape:
        if self.kind[row] == OpKind.COLLECTIVE:
            shape: Shape = self.shapes[self.group[row]]
            return shape
        return shape_of([self.rank[row], self.peer[row]], self.per_node)

    def _cost(self, row: int) -> float:
        return seconds(self.op[row], self.bytes[row], self._shape(row), self.topology)

    def _cpu_part(self, row: int) -> float:
        shape = self._shape(row)
        return self.topology.within.cpu if shape.nodes == 1 else self.topology.between.cpu
