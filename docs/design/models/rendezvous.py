"""Model of the rendezvous and of the attempt to reconfigure around it.

unicomm/comms/membership/rendezvous.py: the members meet in a store in steps. In each step a member posts its
value and adds itself to the count of arrivals; the last one writes the outcome by compare-and-set; a member
whose deadline passes writes a failure in the same way. The last step of a reconfiguration decides whether the
new membership exists: unicomm/comms/membership/create.py.

With `watched`, members look at their connections while they wait, as in a reconfiguration
(unicomm/comms/membership/reconfigure_session.py). A member that raises says so on its connections; the end of
a connection is the end of a member's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put, ranks

RUNS, STOPPED, DEAD = "runs", "stopped", "dead"
POST, ARRIVE, LAST, DECIDE, AWAIT, GRACE, CALL = (
    "posts", "arrives", "is last", "decides", "waits", "waits for the elected", "calls the roll",
)  # fmt: skip
WENT_ON, OK, ERROR = "", "member", "error"


class Outcome(NamedTuple):
    """What stands in `result` of a step: success, or a failure that names ranks."""

    ok: bool
    kind: str = ""
    culprits: frozenset[int] = frozenset()


class Member(NamedTuple):
    """One member's place in the protocol.

    Attributes:
        step, at: the step of the meeting, and what it does next in it.
        late: its deadline has passed. alone: it has waited for the elected member in vain.
        end: WENT_ON, OK or ERROR. error: the outcome that it raises.
        told: it has heard on its connections that these members have given up.
        interrupted: Ctrl-C or `abort()` of its own program.
    """

    step: int = 0
    at: str = POST
    late: bool = False
    elected: bool = False
    end: str = WENT_ON
    error: Outcome | None = None
    interrupted: bool = False
    life: str = RUNS


class Keys(NamedTuple):
    """The keys of one step."""

    posts: frozenset[int] = frozenset()
    arrived: frozenset[int] = frozenset()
    last: int = -1
    abandon: int = 0
    result: Outcome | None = None


class State(NamedTuple):
    member: tuple[Member, ...]
    store: tuple[Keys, ...]
    cause: str
    broken: str


MUTANTS = {
    "outcome overwritten": "a member raises although the others have succeeded",
    "giving up without telling": "a member succeeds although another one has given up",
    "arrivals not counted": "a member succeeds although another one has not come",
    "nobody takes over": "a member waits for ever for the one that was elected",
    "nobody is asked who is here": "a timeout names nobody: a member died between its post and its arrival",
    "one member decides for itself": "the first member succeeds before all have come",
    "loss not put into the store": "a member that finds another one gone raises, and the others succeed",
}


class Meeting(Model[State]):
    """Members that meet in some steps, of which the last one creates the membership."""

    def __init__(
        self,
        size: int,
        steps: int,
        faults: tuple[str, ...] = (),
        watched: bool = False,
        without: str = "",
    ) -> None:
        self.size, self.count, self.faults, self.watched, self.without = size, steps, faults, watched, without
        kind = "reconfigure" if watched else "rendezvous"
        self.title = f"{kind}, {size} members, {steps} steps, {'/'.join(faults) or 'no faults'}"

    def start(self) -> State:
        absent = "absent" in self.faults  # the last member has not come yet, and may never come
        members = (*(Member(),) * (self.size - 1), Member(life=STOPPED if absent else RUNS))
        return State(members, (Keys(),) * (self.count + 1), "late" if absent else "", "")

    def canonical(self, state: State) -> State:
        """Members are equal, but for their numbers: sorted, with the numbers in the store exchanged alike."""
        if state.broken:
            return state
        keys = [
            (
                *m[:4], m.end, m.interrupted, m.life, m.error is not None and (m.error.ok, m.error.kind),
                *(r in k.posts for k in state.store),
                *(r in k.arrived for k in state.store), *(k.last == r for k in state.store),
                *(bool(k.result) and r in k.result.culprits for k in state.store if k.result),
                *(sorted(r in o.error.culprits for o in state.member if o.error)),
            )
            for r, m in enumerate(state.member)
        ]  # fmt: skip
        order = sorted(range(self.size), key=lambda r: repr(keys[r]))
        if order == list(range(self.size)):
            return state
        new = {old: at for at, old in enumerate(order)}

        def swapped(outcome: Outcome | None) -> Outcome | None:
            if outcome is None or not outcome.culprits:
                return outcome
            return outcome._replace(culprits=frozenset(new[r] for r in outcome.culprits))

        store = tuple(
            k._replace(
                posts=frozenset(new[r] for r in k.posts),
                arrived=frozenset(new[r] for r in k.arrived),
                last=new.get(k.last, -1),
                result=swapped(k.result),
            )
            for k in state.store
        )
        member = tuple(state.member[r]._replace(error=swapped(state.member[r].error)) for r in order)
        return state._replace(member=member, store=store)

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.member):
            yield from self._faults(state, r, me)
            if me.life == RUNS and not me.end:
                yield from self._play(state, r, me, state.store[me.step])

    def _play(self, state: State, r: int, me: Member, keys: Keys) -> Iterator[Step]:
        """`_play` of one step; `_complete`, `_await` and `_give_up` are what it calls."""
        who = f"member {r}"
        if me.at == POST:
            after = self._store(state, me.step, keys._replace(posts=keys.posts | {r}))
            yield Step(who, f"posts in step {me.step}", self._at(after, r, ARRIVE))
        elif me.at == ARRIVE:
            arrived = keys.arrived | {r}
            needed = self.size - (self.without == "arrivals not counted")
            last = len(arrived) >= needed or self.without == "one member decides for itself"
            named = keys._replace(arrived=arrived)
            after = self._store(state, me.step, named)
            yield Step(who, f"arrives as number {len(arrived)}", self._at(after, r, LAST if last else AWAIT))
        elif me.at == LAST:
            after = self._store(state, me.step, keys._replace(last=r))
            yield Step(who, "puts its name", self._at(after, r, DECIDE))
        elif me.at == DECIDE:
            after = self._first(state, me.step, Outcome(True))
            yield Step(who, "writes success, unless there is an outcome", self._at(after, r, AWAIT))
        elif me.at in (AWAIT, GRACE):
            if keys.result:
                yield self._take(state, r, me, keys.result)
                return
            if me.at == AWAIT and me.late:
                elected = keys.abandon == 0
                after = self._store(state, me.step, keys._replace(abandon=keys.abandon + 1))
                yield Step(who, "gives up", self._at(after, r, CALL if elected else GRACE))
            elif me.at == GRACE and self.without != "nobody takes over":
                yield Step("time", f"member {r} has waited for the elected one", self._at(state, r, CALL))
            if self.watched:
                yield from self._look(state, r, me, keys)
        elif me.at == CALL:
            # If all have posted, it waits first: whoever runs goes on within that time.
            busy = (
                m.at in (ARRIVE, LAST, DECIDE) and m.life == RUNS
                for m in state.member
                if m.step == me.step and not m.end
            )
            if len(keys.posts) < self.size or not any(busy):
                yield self._call_the_roll(state, r, me, keys)

    def _take(self, state: State, r: int, me: Member, outcome: Outcome) -> Step:
        who = f"member {r}"
        if not outcome.ok:
            return Step(who, f"raises {_text(outcome)}", self._raise(state, r, outcome))
        if me.step + 1 < self.count:
            after = self._with(state, r, me._replace(step=me.step + 1, at=POST))
            return Step(who, f"goes on to step {me.step + 1}", after)
        return Step(who, "is a member", self._with(state, r, me._replace(end=OK)))

    def _call_the_roll(self, state: State, r: int, me: Member, keys: Keys) -> Step:
        """`_give_up`: who has not posted; if all have, who does not answer; else the last one."""
        everybody = frozenset(range(self.size))
        missing = everybody - keys.posts
        if not missing and self.without != "nobody is asked who is here":
            # Who runs answers, and goes on.
            missing = frozenset(p for p, m in enumerate(state.member) if m.life != RUNS and not m.end)
        if not missing and keys.last >= 0:
            missing = frozenset({keys.last})
        failure = Outcome(False, "timeout", missing)
        if self.without == "giving up without telling":
            return Step(f"member {r}", f"raises {_text(failure)}", self._raise(state, r, failure))
        after = self._first(state, me.step, failure)
        return Step(
            f"member {r}", f"writes {_text(failure)}, unless there is an outcome", self._at(after, r, GRACE)
        )

    def _look(self, state: State, r: int, me: Member, keys: Keys) -> Iterator[Step]:
        """`check_peers`: another member has died, or has said that it gave up."""
        gone = frozenset(p for p, m in enumerate(state.member) if m.life == DEAD)
        gave_up = frozenset(p for p, m in enumerate(state.member) if m.end == ERROR)
        if me.interrupted:
            failure = Outcome(False, "aborted", frozenset({r}))
        elif gone:
            failure = Outcome(False, "lost", gone)
        elif gave_up:
            failure = state.member[min(gave_up)].error or Outcome(False, "lost", gave_up)
        else:
            return
        who = f"member {r}"
        if self.without == "loss not put into the store":
            yield Step(who, f"raises {_text(failure)}", self._raise(state, r, failure))
        else:
            after = self._first(state, me.step, failure)
            yield Step(who, f"writes {_text(failure)}, unless there is an outcome", self._at(after, r, AWAIT))

    def _first(self, state: State, step: int, outcome: Outcome) -> State:
        """Compare-and-set: the first outcome stands."""
        keys = state.store[step]
        if keys.result is not None and self.without != "outcome overwritten":
            return state
        return self._store(state, step, keys._replace(result=outcome))

    def _raise(self, state: State, r: int, outcome: Outcome) -> State:
        after = self._with(state, r, state.member[r]._replace(end=ERROR, error=outcome))
        return after._replace(broken=self._untruthful(after, r, outcome))

    def _untruthful(self, state: State, r: int, outcome: Outcome) -> str:
        if not state.cause:
            return f"member {r} raises {_text(outcome)} although nothing went wrong"
        if not outcome.culprits:
            return f"member {r} raises {_text(outcome)}, which names nobody"
        if outcome.kind in ("lost", "left", "aborted"):
            for p in outcome.culprits:
                other = state.member[p]
                if other.life == RUNS and not other.interrupted:
                    return f"member {r} raises {_text(outcome)}, but member {p} is there"
        return ""

    # --- faults, and what must hold ------------------------------------------------------------------------

    def _faults(self, state: State, r: int, me: Member) -> Iterator[Step]:
        if me.life == STOPPED:
            yield Step(
                "fault", f"member {r} continues", self._with(state, r, me._replace(life=RUNS)), fair=False
            )
        if me.life != RUNS or me.end:
            return
        if me.at == AWAIT and not me.late and ("late" in self.faults or state.cause):
            late = self._with(state, r, me._replace(late=True))._replace(cause=state.cause or "late")
            yield Step("time", f"the deadline of member {r} passes", late, fair=bool(state.cause))
        if state.cause not in ("", "late"):
            return
        if "killed" in self.faults:
            dead = self._with(state, r, me._replace(life=DEAD))._replace(cause="killed")
            yield Step("fault", f"member {r} is killed", dead, fair=False)
        if "stopped" in self.faults:
            stopped = self._with(state, r, me._replace(life=STOPPED))._replace(cause="stopped")
            yield Step("fault", f"member {r} is stopped", stopped, fair=False)
        if "interrupted" in self.faults:
            noted = self._with(state, r, me._replace(interrupted=True))._replace(cause="interrupted")
            if self.watched:  # abort() is seen at the next look
                yield Step("fault", f"member {r} is told to abort", noted, fair=False)
            else:
                yield Step("fault", f"member {r} is interrupted", self._leave(noted, r, me), fair=False)

    def _leave(self, state: State, r: int, me: Member) -> State:
        """`Rendezvous.abort`: fails this step, or, if that has succeeded meanwhile, the next one."""
        failure = Outcome(False, "left", frozenset({r}))
        for step in (me.step, me.step + 1):
            state = self._first(state, step, failure)
            result = state.store[step].result
            if result is not None and not result.ok:
                break
        return self._with(state, r, state.member[r]._replace(end=ERROR, error=failure))

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        members = [r for r, m in enumerate(state.member) if m.end == OK]
        errors = [r for r, m in enumerate(state.member) if m.end == ERROR and not m.interrupted]
        if members and errors:
            return f"{ranks(errors)} raised, and {ranks(members)} are members"
        if members:
            absent = [r for r in range(self.size) if r not in state.store[self.count - 1].posts]
            if absent:
                return f"{ranks(absent)} did not come, and {ranks(members)} are members"
        outcomes = {m.error for m in state.member if m.end == ERROR and m.error and not m.interrupted}
        if len({o.culprits for o in outcomes}) > 1 and not self.watched:
            return "the members raise different errors"
        return ""

    def over(self, state: State) -> bool:
        return all(m.end or m.life != RUNS for m in state.member)

    def show(self, state: State) -> Mapping[str, str]:
        columns = {}
        for r, me in enumerate(state.member):
            at = me.end or f"{me.at} ({me.step})"
            columns[f"member {r}"] = me.life if me.life != RUNS else at
        for step, keys in enumerate(state.store[: self.count]):
            result = "-" if keys.result is None else "success" if keys.result.ok else _text(keys.result)
            columns[f"step {step}"] = (
                f"posts {ranks(keys.posts)} arrived {ranks(keys.arrived)} result {result}"
            )
        return columns

    def _with(self, state: State, r: int, me: Member) -> State:
        return state._replace(member=put(state.member, r, me))

    def _at(self, state: State, r: int, at: str) -> State:
        return self._with(state, r, state.member[r]._replace(at=at))

    def _store(self, state: State, step: int, keys: Keys) -> State:
        return state._replace(store=put(state.store, step, keys))


def _text(outcome: Outcome) -> str:
    return f"{outcome.kind.upper()} {ranks(outcome.culprits)}"


FAULTS = ("killed", "stopped", "interrupted", "late")


def small() -> Iterator[Meeting]:
    for watched in (False, True):
        yield Meeting(2, 2, FAULTS, watched)
        yield Meeting(3, 1, FAULTS, watched)
        yield Meeting(3, 2, ("killed",), watched)
        yield Meeting(3, 1, ("absent", "killed", "stopped"), watched)


def large() -> Iterator[Meeting]:
    for watched in (False, True):
        yield Meeting(2, 3, FAULTS, watched)
        yield Meeting(3, 2, FAULTS, watched)
        yield Meeting(4, 1, FAULTS, watched)


def mutant(name: str) -> Meeting:
    size, steps, faults, watched = {
        "outcome overwritten": (2, 1, ("late",), False),
        "giving up without telling": (2, 1, ("late",), False),
        "arrivals not counted": (2, 1, (), False),
        "nobody takes over": (3, 1, ("absent", "killed"), False),
        "one member decides for itself": (2, 1, (), False),
        "loss not put into the store": (3, 1, ("killed",), True),
        "nobody is asked who is here": (2, 1, ("killed",), False),
    }[name]
    return Meeting(size, steps, faults, watched, name)


PROTOCOL = Protocol("rendezvous", small, large, mutant, MUTANTS)
