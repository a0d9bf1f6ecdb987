"""Ranks that wait for each other, found from what all of them say at a deadline.

A rank lists the messages that it waits for. Some of them may be over without its knowledge: Gloo has a batch
wait for one message after the other. So it is certain that a rank waits for another one only when that one,
asked later, says that it has not begun its end of the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicomm._core import Counts

from .operation import Awaited, Operation, is_collective, needed
from .wire import Bye, Here


class Circles:
    """What one rank knows of who waits for whom, while it looks for circles.

    Args:
        rank: this rank. counts: what it has begun. operation: what it is in.
        answers: where the other ranks are, as those say that answer.
    """

    def __init__(self, rank: int, counts: Counts, operation: Operation, answers: Mapping[int, Here]) -> None:
        self.operation = operation
        self.answers = answers = dict(sorted(answers.items()))  # so all ranks find the same circle
        self._rank, self._counts = rank, counts
        self._entered = {peer: answer.entered for peer, answer in answers.items()} | {rank: counts.entered}
        self._whole = {peer: answer.whole for peer, answer in answers.items()} | {rank: counts.whole}
        self._waits = self._find_waits()
        self._certain: set[tuple[int, int]] = set()

    def find(self) -> list[int]:
        """Returns a circle to which this rank's waits lead, each rank before one it waits for; [] if none."""
        circle = find_circle(self._waits, self._rank)
        # A circle of others is no cause if this rank also waits for one that is in no operation.
        others = () if self._rank in circle else self._waits.get(self._rank, ())
        return circle if all(peer in self._waits for peer in others) else []

    def uncertain(self, circle: Sequence[int]) -> dict[int, int]:
        """Returns which ranks of a circle have to be asked before it is certain, and with whose messages."""
        return {to: by for by, to in links(circle) if to != self._rank and (by, to) not in self._certain}

    def hear(self, asked: Mapping[int, int], answers: Mapping[int, Here]) -> None:
        """Takes note of the answers of the ranks that were asked because of `uncertain`."""
        for to, by in asked.items():
            if to in answers and self._waits_still(by, to, answers[to]):
                self._certain.add((by, to))
            else:
                self._waits[by].remove(to)

    def _find_waits(self) -> dict[int, list[int]]:
        """Returns, for this rank and each one that has answered, which ranks it waits for."""
        waits = {}
        for rank, answer in self.answers.items():
            if is_collective(answer.inside):
                number, of_all = self._collective(answer)
                waits[rank] = [peer for peer, entered in of_all.items() if entered < number]
            elif answer.inside:
                waits[rank] = [
                    peer
                    for peer in needed(answer.awaits)
                    if peer in self.answers or (peer == self._rank and self._owes(rank, answer))
                ]
        operation = self.operation
        if operation.number or needed(operation.awaits):
            waits[self._rank] = [p for p, answer in self.answers.items() if misses(operation, p, answer)]
        return waits

    def _collective(self, answer: Here) -> tuple[int, dict[int, int]]:
        """Returns the number of the collective that a rank is in, and how many each rank has entered.

        Between hosts a collective has parts, which only some of the ranks enter. All ranks count the whole
        ones, so these are compared where the rank is in one.
        """
        return (answer.whole, self._whole) if answer.whole else (answer.entered, self._entered)

    def _owes(self, rank: int, answer: Here) -> bool:
        """Whether this rank has not begun its end of a message that `rank` waits for."""
        return any(
            self._counts.of(rank, not message.send, message.part) < message.number
            for message in answer.awaits
            if message.peer == self._rank
        )

    def _waits_still(self, rank: int, to: int, later: Here) -> bool:
        """Whether `rank` waits for `to`, by a later answer of that one."""
        if rank == self._rank:
            if self.operation.number:
                return misses(self.operation, to, later)
            awaits = self.operation.awaits.copy()
        else:
            answer = self.answers[rank]
            if is_collective(answer.inside):
                return (later.whole if answer.whole else later.entered) < self._collective(answer)[0]
            awaits = list(answer.awaits)
        # Messages with tags have no numbers. One that a rank waits for alone is not over, or it would go on.
        return any(lacks(m, later) and (m.number > 0 or len(awaits) == 1) for m in awaits if m.peer == to)


def links(circle: Sequence[int]) -> list[tuple[int, int]]:
    """Returns each rank of a circle with the one that it waits for."""
    return list(zip(circle, [*circle[1:], *circle[:1]], strict=True))


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


def misses(operation: Operation, peer: int, answer: Here | Bye) -> bool:
    """Whether an operation waits for `peer`, by its answer or what it said when it finalized."""
    if operation.whole:
        return isinstance(answer, Here) and answer.whole < operation.number
    if operation.number:
        return answer.entered < operation.number
    return any(m.peer in (peer, -1) and lacks(m, answer) for m in operation.awaits)


def lacks(message: Awaited, answer: Here | Bye) -> bool:
    """Whether the peer has not begun its end of a message.

    A receive from any rank waits for every rank: nobody knows which one was to send. Nor does the peer's
    count tell of messages with tags.
    """
    if message.part:
        begun = answer.taken_parts if message.send else answer.sent_parts
    else:
        begun = answer.taken if message.send else answer.sent
    return not message.number or begun < message.number
