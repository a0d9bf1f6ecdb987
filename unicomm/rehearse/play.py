"""Plays the operations of all ranks by the rules by which they block, without data.

Every rank's program is a list of steps: it issues an operation, or waits for one that it has issued. The
rules:

- A collective completes when all members have issued it with calls that fit together.
- A send completes when its receive is there (rendezvous), or at once (buffered).
- The operations of one communicator run one after the other on each rank; neighbouring messages run side by
  side, or in order as on a GPU's stream (`Rules.messages_in_order`).

Except for receives from any rank, nothing depends on which rank is faster: a step that can be taken stays
possible whatever other ranks do, so all schedules end alike, and one play decides. Where receives from any
rank have several senders, `hanging_schedule` plays all choices, the shortest first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from unicomm.flight_recorder.analysis.matching import call_signatures, unfit_parts
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import BATCH
from unicomm.flight_recorder.table.table import Table

#: A choice: the row of a receive from any rank, and the row of the send that it gets.
Choice = tuple[int, int]

#: Group, sender, receiver, tag: messages of a channel arrive in their order.
Channel = tuple[int, int, int, int]

_MOST_PLAYS = 512


@dataclass(frozen=True)
class Rules:
    """How operations block.

    Attributes:
        buffered: whether a send completes without its receive.
        messages_in_order: whether messages of one communicator run one after the other, but for batches.
    """

    buffered: bool = False
    messages_in_order: bool = False


@dataclass
class Played:
    """The end of a play.

    Attributes:
        issued: by rank, how many of its rows it has issued.
        blocked: the rows for which ranks wait for ever, by rank.
        created, started, completed: by row, the time of the step; 0 if it was not taken.
        chosen: the choices made. open: the choices that were possible when no other step was.
        partners: by row of a message, that of the other side, once both were there.
    """

    issued: dict[int, int]
    blocked: dict[int, int]
    created: list[int]
    started: list[int]
    completed: list[int]
    chosen: list[Choice] = field(default_factory=list)
    open: list[Choice] = field(default_factory=list)
    partners: dict[int, int] = field(default_factory=dict)

    @property
    def hangs(self) -> bool:
        return bool(self.blocked) or any(
            self.created[row] and not self.completed[row] for row in range(len(self.created))
        )


class Plays:
    """Plays the operations of a table, as often as wanted."""

    def __init__(self, table: Table, rules: Rules, tags: Mapping[int, int] | None = None) -> None:
        """`tags`: of messages that have one, by row."""
        self.rules = rules
        self.tag = [0] * len(table)
        for row, tag in (tags or {}).items():
            self.tag[row] = tag
        self.unfit = {(one.group, one.seq) for one in unfit_parts(table)}
        kinds = table.kind
        self.message = ((kinds == OpKind.SEND) | (kinds == OpKind.RECV)).tolist()
        self.send = (kinds == OpKind.SEND).tolist()
        self.rank, self.group = table.rank.tolist(), table.group.tolist()
        self.seq, self.peer = table.seq.tolist(), table.peer.tolist()
        self.batch = ((table.flags & BATCH) != 0).tolist()
        self.call = table.call.tolist()
        self.signature = call_signatures(table).ids.tolist()
        calls = table.calls
        self.size = np.maximum(calls.in_numel, calls.out_numel).tolist()
        self.dtype = np.maximum(calls.in_dtype, calls.out_dtype).tolist()
        present = set(table.source_of)
        self.present = present
        self.members = [sum(int(r) in present for r in group.ranks) for group in table.groups]
        self.range = {s.rank: range(s.begin, s.end) for s in table.sources if s.rank >= 0}
        self.steps = {rank: self._steps(table, rows) for rank, rows in self.range.items()}

    def _steps(self, table: Table, rows: range) -> list[int]:
        """Returns a rank's steps: the row that it issues, or -1 - the row that it waits for."""
        created = table.created_ns[rows.start : rows.stop].tolist()
        completed = table.completed_ns[rows.start : rows.stop].tolist()
        waits: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for at, time in enumerate(completed):
            if time:
                waits[max(at, bisect_right(created, time) - 1)].append((time, at))
        steps = []
        for at in range(len(rows)):
            steps.append(rows.start + at)
            steps += [-1 - (rows.start + waited) for _, waited in sorted(waits[at])]
        return steps

    def play(self, choices: Sequence[Choice] = (), to_the_end: bool = False) -> Played:
        """Plays with these choices, and returns when no step is left but for further choices.

        With `to_the_end` it makes these too, each time the first that is possible.
        """
        return _Play(self, choices).run(to_the_end)


class _Play:
    def __init__(self, plays: Plays, choices: Sequence[Choice]) -> None:
        self.p, self.choices = plays, deque(choices)
        n = len(plays.rank)
        self.at = dict.fromkeys(plays.steps, 0)
        self.clock = dict.fromkeys(plays.steps, 1)
        self.created, self.started, self.completed = [0] * n, [0] * n, [0] * n
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by rank and group
        self.arrived: dict[tuple[int, int], list[int]] = defaultdict(list)  # by group and number
        self.misfits = set(plays.unfit)  # of `arrived`
        self.sends: dict[Channel, deque[int]] = defaultdict(deque)
        self.recvs: dict[Channel, deque[int]] = defaultdict(deque)
        self.from_any: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)  # by group, rank and tag
        self.ready = deque(sorted(plays.steps))
        self.chosen: list[Choice] = []
        self.partners: dict[int, int] = {}

    def run(self, to_the_end: bool) -> Played:
        while True:
            while self.ready:
                self._go_on(self.ready.popleft())
            if self.choices:
                self._match(*self.choices.popleft())
            elif to_the_end and (choice := next(self._open(), None)):
                self._match(*choice)
            else:
                break
        p = self.p
        blocked = {
            rank: -1 - steps[self.at[rank]] for rank, steps in p.steps.items() if self.at[rank] < len(steps)
        }
        issued = {rank: sum(self.created[row] > 0 for row in rows) for rank, rows in p.range.items()}
        lists = (self.created, self.started, self.completed)
        return Played(issued, blocked, *lists, self.chosen, list(self._open()), self.partners)

    def _go_on(self, rank: int) -> None:
        steps = self.p.steps[rank]
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            if step >= 0:
                self.clock[rank] += 1
                self.created[step] = self.clock[rank]
                queue = self.queues[rank, self.p.group[step]]
                queue.append(step)
                self._advance(queue)
            elif not (over := self.completed[-1 - step]):
                return
            else:
                self.clock[rank] = max(self.clock[rank], over)
            self.at[rank] += 1

    def _advance(self, queue: deque[int]) -> None:
        """Starts the operations of a communicator on a rank that nothing holds up any more."""
        p = self.p
        while queue and self.completed[queue[0]]:
            queue.popleft()
        before = None
        for row in list(queue):
            if self.completed[row]:
                continue
            beside = before is None or (
                p.message[row]
                and p.message[before]
                and (not p.rules.messages_in_order or (p.batch[row] and p.batch[before]))
            )
            if not beside:
                return
            before = row
            if not self.started[row]:
                self.started[row] = max(self.clock[p.rank[row]], self.created[row])
                self._join(row)

    def _join(self, row: int) -> None:
        p = self.p
        group, rank, peer, tag = p.group[row], p.rank[row], p.peer[row], p.tag[row]
        if not p.message[row]:
            rows = self.arrived[group, p.seq[row]]
            rows.append(row)
            if p.signature[p.call[rows[0]]] != p.signature[p.call[row]]:
                self.misfits.add((group, p.seq[row]))
            if len(rows) == p.members[group] and (group, p.seq[row]) not in self.misfits:
                self._complete(rows)
        elif peer >= 0 and peer not in p.present:  # a rank that is not run
            self._complete([row])
        elif p.send[row]:
            if p.rules.buffered:
                self._complete([row])
            if self.recvs[group, rank, peer, tag]:
                self._pair(row, self.recvs[group, rank, peer, tag].popleft())
            else:
                self.sends[group, rank, peer, tag].append(row)
        elif peer < 0:
            self.from_any[group, rank, tag].append(row)
        elif self.sends[group, peer, rank, tag]:
            self._pair(self.sends[group, peer, rank, tag].popleft(), row)
        else:
            self.recvs[group, peer, rank, tag].append(row)

    def _pair(self, send: int, recv: int) -> None:
        self.partners[send], self.partners[recv] = recv, send
        a, b = self.p.call[send], self.p.call[recv]
        if self.p.size[a] == self.p.size[b] and self.p.dtype[a] == self.p.dtype[b]:
            self._complete([row for row in (send, recv) if not self.completed[row]], self.started[send])

    def _complete(self, rows: Sequence[int], least: int = 0) -> None:
        over = max([least, *(self.started[row] for row in rows)]) + 1
        for row in rows:
            self.completed[row] = over
        for row in rows:
            rank = self.p.rank[row]
            self._advance(self.queues[rank, self.p.group[row]])
            self.ready.append(rank)

    # --- receives from any rank -----------------------------------------------------------------------

    def _open(self) -> Iterator[Choice]:
        for place, rows in self.from_any.items():
            if rows:
                for (group, _, to, tag), sends in self.sends.items():
                    if (group, to, tag) == place and sends:
                        yield rows[0], sends[0]

    def _match(self, recv: int, send: int) -> None:
        p = self.p
        self.from_any[p.group[recv], p.rank[recv], p.tag[recv]].popleft()
        self.sends[p.group[send], p.rank[send], p.peer[send], p.tag[send]].popleft()
        self.chosen.append((recv, send))
        self._pair(send, recv)


@dataclass
class Search:
    """The result of a search: a play that hangs or, if none does, the last one; and what was played.

    Attributes:
        plays: how many. exhausted: whether no choice is left, so that a hang would have been found.
    """

    played: Played
    plays: int
    exhausted: bool


def hanging_schedule(plays: Plays) -> Search:
    """Searches for choices with which ranks hang, fewest choices first."""
    waiting: deque[list[Choice]] = deque([[]])
    count = 0
    good: Played | None = None
    while waiting and count < _MOST_PLAYS:
        choices = waiting.popleft()
        played = plays.play(choices)
        count += 1
        if played.open:
            waiting += [[*choices, choice] for choice in played.open]
        elif played.hangs:
            return Search(played, count, True)
        else:
            good = played
    if good is None:
        good = plays.play(played.chosen, to_the_end=True)  # too many choices to play all: any that fit
        count += 1
    return Search(good, count, not waiting)
