"""Model of the search for ranks that wait for each other: csrc/shm/waiting/deadlock.cpp.

Ranks act for each other and wait for each other's acts, each in a program of its own. A rank that waits
publishes that, counts its looks, and reads the waits of the others one by one, twice. The model has one
communicator, no promises of idle threads, and waits for one rank, so that all waits form one ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put

ACT = "act"
Wait = int  # wait until the next rank of the ring has acted that often
Program = tuple[str | Wait, ...]


class Seen(NamedTuple):
    """A wait that was read: its number, the looks since the first reading, and the looks since this one."""

    number: int
    gained: int = 0
    since: int = 0


class Rank(NamedTuple):
    """One rank; `DeadlockDetector` has the same names.

    Attributes:
        at: the next entry of its program. acts: how often it has acted.
        phase: what it does next in a wait; node: of which rank of the ring.
        number: of the published wait, 0 for none. found, left: words in its wait table.
        seen: by the reading under way, and before: by the first one, for each rank of the ring. What counts
            of the numbers of looks is how many were counted since they were read; two are enough.
        end: how it left the program.
    """

    at: int = 0
    acts: int = 0
    phase: str = "ready"
    node: int = 0
    number: int = 0
    found: int = 0
    left: int = 0
    seen: tuple[Seen, ...] = ()
    before: tuple[Seen, ...] = ()
    members: tuple[int, ...] = ()
    end: str = ""


class State(NamedTuple):
    rank: tuple[Rank, ...]
    broken: str


MUTANTS = {
    "no second reading": "ranks that have not looked yet count as waiting",
    "one look is enough": "a look that had begun before counts",
    "numbers not compared": "a later wait counts as the earlier one",
    "no wait for the others": "a rank leaves, and the others no longer find a circle",
}


class Ring(Model[State]):
    """Ranks in a ring, each of which waits for the next one, with a program each."""

    def __init__(
        self,
        programs: tuple[Program, ...],
        deadlines: bool = False,
        without: str = "",
        searching: int | None = None,
    ) -> None:
        """`searching`: how many ranks search, the first ones; the others only look. By default all do."""
        self.programs, self.deadlines, self.without = programs, deadlines, without
        self.size = len(programs)
        self.searching = self.size if searching is None else searching
        kinds = ["+".join("act" if what == ACT else f"wait{what}" for what in p) for p in programs]
        self.title = f"deadlock, {', '.join(kinds)}{', deadlines' * deadlines}"
        if self.searching < self.size:
            self.title += f", {self.searching} of them search"

    def start(self) -> State:
        return State((Rank(),) * self.size, "")

    def _next(self, r: int) -> int:
        return (r + 1) % self.size

    def _waits_in_vain(self, state: State, r: int) -> bool:
        """Whether the rank waits for something that has not happened."""
        me = state.rank[r]
        what = self.programs[r][me.at] if me.at < len(self.programs[r]) else ACT
        return not me.end and what != ACT and state.rank[self._next(r)].acts < int(what)

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.rank):
            if me.end:
                continue
            who = f"rank {r}"
            if me.at == len(self.programs[r]):
                yield Step(who, "has finished", self._with(state, r, me._replace(end="finished")))
            elif self.programs[r][me.at] == ACT:
                yield Step(who, "acts", self._with(state, r, me._replace(at=me.at + 1, acts=me.acts + 1)))
            else:
                yield from self._wait(state, r, me)

    def _wait(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        if me.phase == "ready":
            if not self._waits_in_vain(state, r):
                left = me.number if me.found else me.left
                over = Rank(me.at + 1, me.acts, left=left)
                yield Step(who, "goes on", self._with(state, r, over))
                return
            yield Step(who, "looks in vain", self._with(state, r, me._replace(phase="count")))
            if self.deadlines and me.number:
                late = me._replace(end="timeout", number=0)
                yield Step("time", f"the deadline of rank {r} passes", self._with(state, r, late), fair=False)
        elif me.phase == "count":  # publish, once; and the beginning of `check`
            counted = me._replace(number=me.at + 1, seen=(), node=0, phase="others" if me.found else "read")
            if r >= self.searching:
                counted = counted._replace(phase="ready")
            yield Step(who, "counts its look", self._look(self._with(state, r, counted), r))
        elif me.phase in ("read", "recheck"):  # build_graph: first all waits, then their looks
            yield self._read(state, r, me)
        elif me.phase == "judge":
            yield self._judge(state, r, me)
        else:
            yield from self._others(state, r, me)

    def _look(self, state: State, r: int) -> State:
        """Counts a look, for all that have read the number of looks before."""
        rows = []
        for q, me in enumerate(state.rank):
            at = (r - q) % self.size
            marks = []
            for row in (me.seen, me.before):
                counted = row[at]._replace(since=min(2, row[at].since + 1)) if at < len(row) else None
                marks.append(row if counted is None else put(row, at, counted))
            rows.append(me._replace(seen=marks[0], before=marks[1]))
        return state._replace(rank=tuple(rows))

    def _read(self, state: State, r: int, me: Rank) -> Step:
        who, of = f"rank {r}", (r + me.node) % self.size
        other = state.rank[of]
        gone = me._replace(phase="ready", before=(), seen=(), node=0)
        if not other.number or (me.phase == "recheck" and other.number != me.seen[me.node].number):
            return Step(who, f"sees that {of} does not wait", self._with(state, r, gone))
        last = me.node == self.size - 1
        if me.phase == "read":
            read = me._replace(seen=(*me.seen, Seen(other.number)), node=0 if last else me.node + 1)
            after = read._replace(phase="recheck" if last else "read")
            return Step(who, f"sees that {of} waits", self._with(state, r, after))
        gained = me.before[me.node].since if me.before else 0
        seen = put(me.seen, me.node, Seen(other.number, gained))
        after = me._replace(seen=seen, node=0 if last else me.node + 1, phase="judge" if last else "recheck")
        return Step(who, f"reads the looks of {of}", self._with(state, r, after))

    def _judge(self, state: State, r: int, me: Rank) -> Step:
        who = f"rank {r}"
        again = me._replace(phase="ready", seen=())
        same = [s.number for s in me.before] == [s.number for s in me.seen]
        if self.without == "numbers not compared":
            same = bool(me.before)
        if self.without != "no second reading":
            if not me.before or not same:
                return Step(
                    who,
                    "has a first reading",
                    self._with(
                        state, r, again._replace(before=tuple(Seen(s.number, 0, s.since) for s in me.seen))
                    ),
                )
            if min(s.gained for s in me.seen) < (1 if self.without == "one look is enough" else 2):
                return Step(who, "waits for more looks", self._with(state, r, again))
        members = tuple(s.number for s in me.seen)
        found = self._with(state, r, again._replace(found=me.number, members=members, before=()))
        # If another rank's deadline has passed meanwhile, this rank finds out before it leaves.
        in_time = all(other.end != "timeout" for other in state.rank)
        if in_time and not all(self._waits_in_vain(state, p) for p in range(self.size)):
            found = found._replace(broken=f"rank {r} finds a deadlock that is none")
        return Step(who, "finds a deadlock", found)

    def _others(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        know = True
        for i, number in enumerate(me.members):
            other = state.rank[(r + i) % self.size]
            waits = other.number == number
            if not waits and other.left != number:
                dropped = me._replace(found=0, before=(), members=(), phase="read")
                yield Step(who, "drops it: a rank has gone on", self._with(state, r, dropped))
                return
            know &= not waits or other.found == number
        if know or self.without == "no wait for the others":
            left = me._replace(end="deadlock", left=me.number, number=0)
            if self.without == "no wait for the others":
                left = left._replace(left=0)
            yield Step(who, "raises DeadlockError", self._with(state, r, left))
        else:
            yield Step(who, "waits until the others know", self._with(state, r, me._replace(phase="ready")))

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        ends = {me.end for me in state.rank}
        if "deadlock" in ends and "finished" in ends:
            return "a rank raised DeadlockError, and another one has finished"
        return ""

    def over(self, state: State) -> bool:
        ends = [me.end for me in state.rank]
        told = self.searching < self.size and any(me.found for me in state.rank)
        return all(ends) or "timeout" in ends or told

    def show(self, state: State) -> Mapping[str, str]:
        columns = {}
        for r, me in enumerate(state.rank):
            columns[f"rank {r}"] = me.end or f"entry {me.at}"
            columns[f"table {r}"] = f"waits #{me.number}" if me.number else "-"
        return columns

    def _with(self, state: State, r: int, me: Rank) -> State:
        return state._replace(rank=put(state.rank, r, me))


MUTUAL: tuple[Program, ...] = ((1, ACT), (1, ACT))
ORDERED: tuple[Program, ...] = ((ACT, 1), (1, ACT))
TWICE: tuple[Program, ...] = ((ACT, 1, ACT, 2), (1, ACT, 2, ACT))
LATER: tuple[Program, ...] = ((ACT, 1, 2), (1, ACT, 2))
THREE: tuple[Program, ...] = ((1, ACT), (1, ACT), (1, ACT))
THREE_ORDERED: tuple[Program, ...] = ((1, ACT), (1, ACT), (ACT, 1))


def small() -> Iterator[Ring]:
    for programs in (MUTUAL, ORDERED, TWICE, LATER):
        yield Ring(programs)
    yield Ring(MUTUAL, deadlines=True)


def large() -> Iterator[Ring]:
    yield Ring(LATER, deadlines=True)
    for programs in (THREE, THREE_ORDERED):
        yield Ring(programs, searching=2)


def mutant(name: str) -> Ring:
    programs = {"numbers not compared": TWICE, "no wait for the others": MUTUAL}.get(name, ORDERED)
    return Ring(programs, without=name)


PROTOCOL = Protocol("deadlock", small, large, mutant, MUTANTS)
