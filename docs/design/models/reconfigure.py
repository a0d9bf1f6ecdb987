"""Model of how the ranks of a reconfiguration find each other, and of what they raise when that fails.

unicomm/comms/membership/reconfigure_session.py: the first rank of the list calls all others, and each of the
others holds a call to it until it is invited. The end of a call is the end of a process, and a rank that
leaves the attempt tells its callers why. Then all meet: rendezvous.py has a model of that, of which this one
needs one step that creates the membership when all have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put, ranks

RUNS, STOPPED, DEAD = "runs", "stopped", "dead"
OUT, ENTERED, INVITED, MEETS, MEMBER, RAISED = "out", "entered", "invited", "meets", "member", "raised"


class Error(NamedTuple):
    kind: str
    culprits: frozenset[int]


class Rank(NamedTuple):
    """One rank's `ReconfigureSession`.

    Attributes:
        at: how far it is. error: what it has raised, which its callers are told.
        called: by the first rank: whom it has called. late, cancelled: as in the session.
    """

    at: str = OUT
    error: Error | None = None
    called: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    late: bool = False
    cancelled: bool = False
    life: str = RUNS


class State(NamedTuple):
    rank: tuple[Rank, ...]
    created: bool
    cause: tuple[str, int] | None
    broken: str


MUTANTS = {
    "no call to the first rank": "a rank waits until its deadline for a first rank that is dead",
    "no farewell for those who come later": "a rank waits for a first rank that has given up",
    "calls are closed at once": "a rank waits until its deadline for one that died in the meeting",
    "lists not compared": "ranks with different lists become members",
    "farewell of others unread": "a rank that gave up counts as dead",
    "late first rank not named": "all came, and a rank that is not invited by its deadline names nobody",
}


class Attempt(Model[State]):
    """One attempt of ranks to reconfigure. Rank 0 is the first of the list.

    `absent` ranks never call reconfigure; `odd` ranks were given another list.
    """

    def __init__(
        self,
        size: int,
        faults: tuple[str, ...] = (),
        absent: tuple[int, ...] = (),
        odd: tuple[int, ...] = (),
        without: str = "",
    ) -> None:
        self.size, self.faults, self.absent, self.odd, self.without = size, faults, absent, odd, without
        extra = f", absent {ranks(absent)}" * bool(absent) + f", odd {ranks(odd)}" * bool(odd)
        self.title = f"reconfigure, {size} ranks{extra}, {'/'.join(faults) or 'no faults'}"

    def start(self) -> State:
        return State((Rank(),) * self.size, False, None, "")

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.rank):
            yield from self._faults(state, r, me)
            if me.life == RUNS and me.at not in (MEMBER, RAISED):
                yield from self._step(state, r, me)

    def _step(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who, first = f"rank {r}", state.rank[0]
        if me.at == OUT:
            if r not in self.absent:
                yield Step(who, "calls reconfigure", self._with(state, r, me._replace(at=ENTERED)))
        elif me.at == MEETS:
            yield from self._meet(state, r, me)
        elif me.cancelled:
            yield self._raise(state, r, Error("aborted", frozenset({r})))
        elif r == 0:
            yield self._invite(state, me)
        elif me.at == ENTERED:  # _await_invitation
            if r in first.called:
                yield Step(who, "is invited", self._with(state, r, me._replace(at=INVITED)))
                return
            probes = self.without != "no call to the first rank"
            if probes and first.life == DEAD:
                yield self._raise(state, r, Error("lost", frozenset({0})))
            elif probes and first.error and self.without != "no farewell for those who come later":
                yield self._raise(state, r, first.error)
            elif me.late:
                yield self._raise(state, r, self._late(state, r))
        elif r in self.odd and self.without != "lists not compared":  # INVITED
            yield self._raise(state, r, Error("mismatch", frozenset({r})))
        elif error := self._check(state, r):
            yield self._raise(state, r, error)
        else:
            yield Step(who, "opens the store", self._with(state, r, me._replace(at=MEETS)))

    def _invite(self, state: State, me: Rank) -> Step:
        todo = [p for p in range(1, self.size) if p not in me.called | me.lost]
        if todo:
            p = todo[0]
            if state.rank[p].life == DEAD:
                return Step(
                    "rank 0", f"does not reach {p}", self._with(state, 0, me._replace(lost=me.lost | {p}))
                )
            return Step("rank 0", f"invites {p}", self._with(state, 0, me._replace(called=me.called | {p})))
        if me.lost:
            return self._raise(state, 0, Error("lost", me.lost))
        return Step("rank 0", "opens its store", self._with(state, 0, me._replace(at=MEETS)))

    def _check(self, state: State, r: int) -> Error | None:
        """`check`: the cause that this rank sees on its connections."""
        me, first = state.rank[r], state.rank[0]
        if me.cancelled:
            return Error("aborted", frozenset({r}))
        if self.without == "calls are closed at once":
            return None
        if r:
            return Error("lost", frozenset({0})) if first.life == DEAD else first.error
        gave_up = [p for p in sorted(me.called) if state.rank[p].error]
        lost = frozenset(p for p in me.called if state.rank[p].life == DEAD and not state.rank[p].error)
        if self.without == "farewell of others unread":
            lost, gave_up = lost.union(gave_up), []
        if lost:
            return Error("lost", lost)
        return state.rank[gave_up[0]].error if gave_up else None

    def _late(self, state: State, r: int) -> Error:
        """`_late`: asks all who takes part."""
        there = {
            p for p, m in enumerate(state.rank) if m.at != OUT and m.life == RUNS and (p not in self.odd)
        }
        missing = frozenset(range(self.size)) - there - {r}
        if not missing and self.without != "late first rank not named":
            missing = frozenset({0})
        return Error("timeout", missing)

    def _meet(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        """The meeting in the first rank's store: created when all have come; an outcome stands."""
        who, first = f"rank {r}", state.rank[0]
        if first.life == STOPPED and me.late:  # it answers no request
            yield self._raise(state, r, Error("timeout", frozenset({0})))
        if first.life != STOPPED:
            if state.created and first.life == RUNS:
                yield Step(who, "reads that all have come", self._with(state, r, me._replace(at=MEMBER)))
                return
            if not state.created and first.life == RUNS and all(m.at == MEETS for m in state.rank):
                yield Step(who, "as the last one, writes success", state._replace(created=True))
        # A failure goes into the store, too, so that it excludes the success.
        if not state.created or first.life == DEAD:
            if error := self._check(state, r):
                yield self._raise(state, r, error)
            elif me.late:
                missing = frozenset(p for p, m in enumerate(state.rank) if m.at != MEETS or m.life != RUNS)
                yield self._raise(state, r, Error("timeout", missing - {r} or frozenset({0})))

    def _raise(self, state: State, r: int, error: Error) -> Step:
        after = self._with(state, r, state.rank[r]._replace(at=RAISED, error=error))
        return Step(
            f"rank {r}", f"raises {_text(error)}", after._replace(broken=self._untruthful(state, r, error))
        )

    def _untruthful(self, state: State, r: int, error: Error) -> str:
        if state.cause is None and not self.absent and not self.odd:
            return f"rank {r} raises {_text(error)} although nothing went wrong"
        if not error.culprits:
            return f"rank {r} raises {_text(error)}, which names nobody"
        if error.kind == "lost" and any(state.rank[p].life != DEAD for p in error.culprits):
            return f"rank {r} raises {_text(error)}, but not all of these are dead"
        if error.kind == "mismatch" and not error.culprits <= set(self.odd):
            return f"rank {r} raises {_text(error)}, but these have the list of the first rank"
        return ""

    # --- faults, and what must hold ------------------------------------------------------------------------

    def _faults(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        if me.life == STOPPED:
            yield Step(
                "fault", f"rank {r} continues", self._with(state, r, me._replace(life=RUNS)), fair=False
            )
        if me.life != RUNS or me.at in (MEMBER, RAISED):
            return
        # A run may depend on a deadline only if a rank does not come, or is stopped.
        slow = bool(self.absent) or (state.cause is not None and state.cause[0] == "stopped")
        if me.at in (ENTERED, MEETS) and not me.late and (slow or "late" in self.faults):
            late = self._with(state, r, me._replace(late=True))._replace(cause=state.cause or ("late", r))
            yield Step("time", f"the deadline of rank {r} passes", late, fair=slow)
        if state.cause:
            return
        if "killed" in self.faults:
            dead = self._with(state, r, me._replace(life=DEAD))._replace(cause=("killed", r))
            yield Step("fault", f"rank {r} is killed", dead, fair=False)
        if "stopped" in self.faults:
            stopped = self._with(state, r, me._replace(life=STOPPED))._replace(cause=("stopped", r))
            yield Step("fault", f"rank {r} is stopped", stopped, fair=False)
        if "aborts" in self.faults and me.at != OUT:
            told = self._with(state, r, me._replace(cancelled=True))._replace(cause=("aborts", r))
            yield Step("fault", f"rank {r} is told to abort", told, fair=False)

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        members = {r for r, m in enumerate(state.rank) if m.at == MEMBER}
        raised = {r for r, m in enumerate(state.rank) if m.at == RAISED}
        # Without the first rank there is no store, and who has not read the outcome cannot know it.
        if members and raised and state.cause not in (("killed", 0), ("stopped", 0)):
            return f"{ranks(raised)} raised, and {ranks(members)} are members"
        if members and (self.absent or self.odd):
            return f"{ranks(members)} are members, although not all ranks came with the same list"
        return ""

    def over(self, state: State) -> bool:
        return all(
            m.at in (MEMBER, RAISED) or m.life != RUNS or (r in self.absent and m.at == OUT)
            for r, m in enumerate(state.rank)
        )

    def show(self, state: State) -> Mapping[str, str]:
        columns = {}
        for r, me in enumerate(state.rank):
            at = f"{me.at} {_text(me.error)}" if me.error else me.at
            columns[f"rank {r}"] = me.life if me.life != RUNS else at
        columns["created"] = str(state.created)
        return columns

    def _with(self, state: State, r: int, me: Rank) -> State:
        return state._replace(rank=put(state.rank, r, me))


def _text(error: Error) -> str:
    return f"{error.kind.upper()} {ranks(error.culprits)}"


FAULTS = ("killed", "stopped", "aborts", "late")


def small() -> Iterator[Attempt]:
    for size in (2, 3):
        yield Attempt(size, FAULTS)
        for rank in range(size):
            yield Attempt(size, ("killed",), absent=(rank,))
        yield Attempt(size, ("killed",), odd=(size - 1,))


def large() -> Iterator[Attempt]:
    yield Attempt(4, FAULTS)
    yield Attempt(4, FAULTS, absent=(3,))
    yield Attempt(4, FAULTS, odd=(2,))


def mutant(name: str) -> Attempt:
    size, faults, absent, odd = {
        "no call to the first rank": (2, ("killed",), (), ()),
        "no farewell for those who come later": (2, ("aborts",), (), ()),
        "calls are closed at once": (3, ("killed",), (), ()),
        "lists not compared": (2, (), (), (1,)),
        "farewell of others unread": (3, ("aborts",), (), ()),
        "late first rank not named": (2, ("late",), (), ()),
    }[name]
    return Attempt(size, faults, absent, odd, name)


PROTOCOL = Protocol("reconfigure", small, large, mutant, MUTANTS)
