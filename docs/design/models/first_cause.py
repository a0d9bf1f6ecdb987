"""Model of the first cause: unicomm/comms/failures/first_cause.py in unicomm/backends/hosts/backend.py.

A communicator of several hosts consists of parts, and ends all of them when one fails. So most ranks see only
consequences. A rank that knows the cause at first hand publishes it in the store before it ends its parts.
The others report, end theirs, and wait for a cause; if none comes, who has not reported is the culprit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put, ranks

RUNS, STOPPED, DEAD = "runs", "stopped", "dead"
WORKS, KNOWS, REPORTED, PUBLISHED, SEES, TOLD, WAITS, GUESSES, RAISED = (
    "works", "knows the cause", "has reported", "has published",
    "sees a consequence", "has reported that", "waits for a cause", "guesses", "raised",
)  # fmt: skip


class Rank(NamedTuple):
    """A rank in `HostsBackend._failed`.

    Attributes:
        mine: the culprits that it knows of itself. raised: those of its error.
    """

    at: str = WORKS
    mine: frozenset[int] = frozenset()
    raised: frozenset[int] | None = None
    life: str = RUNS


class State(NamedTuple):
    """`cause` and `reported` are in the store; `ended` are the ranks that have ended their parts."""

    rank: tuple[Rank, ...]
    cause: frozenset[int] | None
    reported: frozenset[int]
    ended: frozenset[int]
    culprit: int
    broken: str


MUTANTS = {
    "parts ended before the cause is published": "a rank takes a consequence for the cause",
    "last cause stands": "ranks raise different errors",
    "no wait for a cause": "a rank names one that is alive",
    "reports after the guess": "a rank that is alive counts as missing",
}


class FirstCauses(Model[State]):
    """Ranks of which one dies or is stopped. `witnesses` find that out themselves; the others need not.

    With `hasty` among the faults ranks do not wait long enough: then all raise the same error, but maybe a
    wrong one.
    """

    def __init__(
        self, size: int, witnesses: tuple[int, ...], faults: tuple[str, ...], without: str = ""
    ) -> None:
        self.size, self.witnesses, self.faults, self.without = size, witnesses, faults, without
        self.hasty = "hasty" in faults
        self.title = (
            f"first cause, {size} ranks, {ranks(witnesses)} know it at first hand, {'/'.join(faults)}"
        )

    def start(self) -> State:
        return State((Rank(),) * self.size, None, frozenset(), frozenset(), -1, "")

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.rank):
            yield from self._faults(state, r, me)
            if me.life == RUNS and me.raised is None:
                yield from self._failed(state, r, me)

    def _failed(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        if me.at == WORKS:
            # A connection to a dead rank ends; one to a stopped rank is overdue at the witnesses first.
            gone = state.culprit >= 0 and state.rank[state.culprit].life == DEAD
            if state.culprit not in (-1, r) and r in self.witnesses:
                knows = me._replace(at=KNOWS, mine=frozenset({state.culprit}))
                yield Step(who, f"finds that {state.culprit} is missing", self._with(state, r, knows))
            overdue = state.culprit not in (-1, r) and not self.witnesses
            if gone or state.ended or overdue:
                yield Step(who, "sees a connection end", self._with(state, r, me._replace(at=SEES)))
        elif me.at == KNOWS:
            reported = state._replace(reported=state.reported | {r})
            yield Step(who, "reports", self._with(reported, r, me._replace(at=REPORTED)))
        elif me.at == REPORTED:
            if self.without == "parts ended before the cause is published" and r not in state.ended:
                yield Step(who, "ends its parts", state._replace(ended=state.ended | {r}))
            else:
                after = self._publish(state, me.mine)
                yield Step(
                    who, f"publishes {ranks(me.mine)}", self._with(after, r, me._replace(at=PUBLISHED))
                )
        elif me.at == PUBLISHED:
            yield self._raise(state._replace(ended=state.ended | {r}), r, state.cause or me.mine)
        elif me.at == SEES:
            late = self.without == "reports after the guess"
            reported = state if late else state._replace(reported=state.reported | {r})
            yield Step(who, "reports", self._with(reported, r, me._replace(at=TOLD)))
        elif me.at == TOLD:
            ended = state._replace(ended=state.ended | {r})
            yield Step(who, "ends its parts", self._with(ended, r, me._replace(at=WAITS)))
        elif me.at == WAITS:
            if state.cause is not None:
                yield self._raise(state, r, state.cause)
            # A rank that runs sees a consequence, reports and publishes within the grace.
            busy = any(
                p != r and m.life == RUNS and m.at in (WORKS, KNOWS, REPORTED, SEES)
                for p, m in enumerate(state.rank)
            )
            if self.without == "parts ended before the cause is published":
                busy = any(
                    p != r and m.life == RUNS and m.at in (WORKS, KNOWS, SEES)
                    for p, m in enumerate(state.rank)
                )
            if state.cause is None and (not busy or self.hasty or self.without == "no wait for a cause"):
                silent = frozenset(range(self.size)) - state.reported - {r}
                yield Step("time", f"rank {r} has waited; {ranks(silent)} have not reported",
                           self._with(state, r, me._replace(at=GUESSES, mine=silent)))  # fmt: skip
        elif me.at == GUESSES:
            after = self._publish(state, me.mine)
            yield Step(who, f"publishes {ranks(me.mine)}", self._with(after, r, me._replace(at=PUBLISHED)))

    def _publish(self, state: State, culprits: frozenset[int]) -> State:
        """Compare-and-set: the first cause stands."""
        first = state.cause is None or self.without == "last cause stands"
        return state._replace(cause=culprits) if first else state

    def _raise(self, state: State, r: int, culprits: frozenset[int]) -> Step:
        after = self._with(state, r, state.rank[r]._replace(at=RAISED, raised=culprits))
        return Step(f"rank {r}", f"raises an error that names {ranks(culprits)}", after)

    def _faults(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        if me.life == STOPPED:
            yield Step(
                "fault", f"rank {r} continues", self._with(state, r, me._replace(life=RUNS)), fair=False
            )
        if state.culprit >= 0 or me.life != RUNS or r in self.witnesses:
            return
        for kind, life in (("killed", DEAD), ("stopped", STOPPED)):
            if kind in self.faults:
                after = self._with(state, r, me._replace(life=life))._replace(culprit=r)
                yield Step("fault", f"rank {r} is {kind}", after, fair=False)

    def violation(self, state: State) -> str:
        raised = {me.raised for me in state.rank if me.raised is not None}
        if len(raised) > 1:
            return "the ranks name " + " and ".join(sorted(ranks(found) for found in raised))
        for found in () if self.hasty else raised:
            if not found:
                return "an error names nobody"
            if found != {state.culprit}:
                return f"an error names {ranks(found)}, but rank {state.culprit} is the cause"
        return ""

    def over(self, state: State) -> bool:
        return state.culprit < 0 or all(me.raised is not None or me.life != RUNS for me in state.rank)

    def show(self, state: State) -> Mapping[str, str]:
        columns = {f"rank {r}": me.life if me.life != RUNS else me.at for r, me in enumerate(state.rank)}
        columns["cause"] = "-" if state.cause is None else ranks(state.cause)
        columns["reported"], columns["ended"] = ranks(state.reported), ranks(state.ended)
        return columns

    def _with(self, state: State, r: int, me: Rank) -> State:
        return state._replace(rank=put(state.rank, r, me))


FAULTS = ("killed", "stopped")


def small() -> Iterator[FirstCauses]:
    yield FirstCauses(3, (), ("killed",))  # without a witness, nobody notices a rank that goes on again
    for witnesses in ((1,), (0, 1)):
        yield FirstCauses(3, witnesses, FAULTS)
        yield FirstCauses(3, witnesses, (*FAULTS, "hasty"))


def large() -> Iterator[FirstCauses]:
    yield FirstCauses(4, (), ("killed",))
    for witnesses in ((1,), (0, 1), (0, 1, 2)):
        yield FirstCauses(4, witnesses, (*FAULTS, "hasty"))
        yield FirstCauses(5, witnesses, FAULTS)


def mutant(name: str) -> FirstCauses:
    witnesses = () if name == "reports after the guess" else (1,)
    faults = (*FAULTS, "hasty") if name == "last cause stands" else FAULTS if witnesses else ("killed",)
    return FirstCauses(3, witnesses, faults, name)


PROTOCOL = Protocol("first_cause", small, large, mutant, MUTANTS)
