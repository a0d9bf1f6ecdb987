"""Model of the fault channel: unicomm/backends/out_of_band/fault_channel.py, and how operations end there.

The library moves the data: its collective ends on a rank when all ranks have entered it, and with an error
when the rank has a fault. Each rank has two threads: the one that runs the program, and the one that serves
the channel. Connections keep the order of one rank's messages to another one, and no other order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put, ranks

RUNS, STOPPED, DEAD = "runs", "stopped", "dead"


class Fault(NamedTuple):
    code: str
    by: int
    culprits: frozenset[int]


class Ask(NamedTuple):
    about: int


class Here(NamedTuple):
    about: int
    entered: int
    inside: bool


class Bye(NamedTuple):
    entered: int


class End(NamedTuple):
    """The connection has ended with its process."""


Message = Fault | Ask | Here | Bye | End


class Rank(NamedTuple):
    """One rank's end of the channel: the attributes of `FaultChannel` have the same names.

    Attributes:
        inside: the collective it is in; 0 for none. late: its deadline has passed.
        answers: of the overdue operation; None unless it has asked. there: who had entered it at that time.
        telling: the peers that still have to be told of its fault, in order; it holds the lock meanwhile.
        raised: the program has got the error. done: collectives that it has completed.
    """

    entered: int = 0
    inside: int = 0
    done: int = 0
    late: bool = False
    fault: Fault | None = None
    telling: tuple[int, ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    gone: frozenset[int] = frozenset()
    answers: tuple[tuple[int, Here], ...] | None = None
    there: frozenset[int] = frozenset()
    raised: bool = False
    closed: bool = False
    life: str = RUNS


class State(NamedTuple):
    rank: tuple[Rank, ...]
    wires: tuple[tuple[tuple[Message, ...], ...], ...]  # by sender and receiver
    cause: tuple[str, int] | None
    broken: str


MUTANTS = {
    "nobody is told": "a rank waits for one that has given up",
    "goodbye without its number": "a rank that has finished and left is lost for one in the same collective",
    "ends are not noticed": "a rank waits for a dead one, whose end it does not notice",
    "no wait for the answers": "a rank is named that had entered the collective",
    "answers without their question": "an answer to an earlier question counts, and the wrong rank is named",
    "goodbye of a rank that was told": "a rank that leaves because of a fault is lost for one that has not"
    " heard of the fault yet",
}
LIMITS = {
    "two verdicts at one time": "two ranks whose deadlines pass at the same time may name different ranks",
}


class FaultChannels(Model[State]):
    """The ranks of one communicator that run some collectives, with one fault at most."""

    def __init__(
        self,
        world: int,
        collectives: int,
        faults: tuple[str, ...] = (),
        without: str = "",
        impatient: int | None = None,
    ) -> None:
        """`impatient`: the deadline passes on that many ranks at most, the first ones; by default on all."""
        self.world, self.collectives, self.faults, self.without = world, collectives, faults, without
        self.impatient = world if impatient is None else impatient
        self.title = (
            f"fault channel, {world} ranks, {collectives} collective{'s' * (collectives > 1)},"
            f" {'/'.join(faults) or 'no faults'}"
        )

    def start(self) -> State:
        n = self.world
        return State((Rank(),) * n, (((),) * n,) * n, None, "")

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.rank):
            yield from self._faults(state, r, me)
            if me.life != RUNS or me.closed:
                continue
            if me.telling:
                yield self._tell_next(state, r, me)
                continue  # it holds the lock
            yield from self._program(state, r, me)
            yield from self._on_time(state, r, me)
            for peer in range(self.world):
                if state.wires[peer][r]:
                    yield self._readable(state, r, me, peer)

    # --- the thread of the program -------------------------------------------------------------------------

    def _program(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        if me.raised or (me.done == self.collectives and not me.inside):
            yield Step(who, "finalizes", self._close(state, r, me))
        elif not me.inside:
            if me.fault:  # check_fault
                yield Step(who, f"raises {_text(me.fault)}", self._with(state, r, me._replace(raised=True)))
            elif self.without != "two verdicts at one time" or r < self.impatient:  # begin
                number = me.done + 1
                after = me._replace(entered=number, inside=number, late=False)
                yield Step(who, f"enters collective {number}", self._with(state, r, after))
        else:
            if me.fault:  # the library's wait was interrupted
                after = me._replace(raised=True, inside=0, answers=None, there=frozenset())
                yield Step(who, f"raises {_text(me.fault)}", self._with(state, r, after))
            if all(other.entered >= me.inside for other in state.rank) and not any(
                other.raised and other.done < me.inside for other in state.rank
            ):
                after = me._replace(inside=0, done=me.done + 1, late=False, answers=None, there=frozenset())
                yield Step(who, f"completes collective {me.inside}", self._with(state, r, after))

    def canonical(self, state: State) -> State:
        """Without messages that nobody reads any more, or that change nothing: a rank with a fault has it."""
        wires = state.wires
        for r, me in enumerate(state.rank):
            over = me.closed or me.life == DEAD
            if not over and not me.fault:
                continue
            for p in range(self.world):
                if wire := wires[p][r]:
                    kept = () if over else tuple(m for m in wire if isinstance(m, Ask))
                    wires = put(wires, p, put(wires[p], r, kept))
        rows = state.rank
        for r, me in enumerate(rows):
            if me.telling:
                deaf = [
                    p for p, other in enumerate(rows) if other.closed or other.fault or other.life == DEAD
                ]
                telling = tuple(p for p in me.telling if p not in deaf)
                rows = put(rows, r, me._replace(telling=telling))
        return state._replace(wires=wires, rank=rows)

    def _close(self, state: State, r: int, me: Rank) -> State:
        repeats = (
            me.fault is not None and me.fault.by != r and self.without != "goodbye of a rank that was told"
        )
        number = 0 if self.without == "goodbye without its number" else me.entered
        after = self._with(state, r, me._replace(closed=True, answers=None, there=frozenset()))
        for peer in range(self.world):
            if me.fault is not None and repeats:
                after = self._send(after, r, peer, me.fault._replace(by=r))
            after = self._send(after, r, peer, Bye(number))
        return after

    # --- the thread of the channel -------------------------------------------------------------------------

    def _send(self, state: State, r: int, peer: int, message: Message) -> State:
        other = state.rank[peer]
        if peer == r or other.closed or other.life == DEAD or (other.fault and not isinstance(message, Ask)):
            return state  # nobody reads it, or it would change nothing
        return state._replace(
            wires=put(state.wires, r, put(state.wires[r], peer, (*state.wires[r][peer], message)))
        )

    def _tell_next(self, state: State, r: int, me: Rank) -> Step:
        peer, *rest = me.telling
        assert me.fault is not None
        after = self._with(state, r, me._replace(telling=tuple(rest)))
        return Step(f"rank {r}", f"tells rank {peer} {_text(me.fault)}", self._send(after, r, peer, me.fault))

    def _set(self, state: State, r: int, fault: Fault, tell: bool = True) -> State:
        me = state.rank[r]
        if me.fault is not None:
            return state
        telling = tuple(p for p in range(self.world) if p != r) if tell else ()
        if self.without == "nobody is told":
            telling = ()
        after = self._with(
            state, r, me._replace(fault=fault, telling=telling, answers=None, there=frozenset())
        )
        return after._replace(broken=self._untruthful(state, r, fault))

    def _readable(self, state: State, r: int, me: Rank, peer: int) -> Step:
        message, *rest = state.wires[peer][r]
        taken = state._replace(wires=put(state.wires, peer, put(state.wires[peer], r, tuple(rest))))
        who, what = f"rank {r}", f"reads {_name(message)} of rank {peer}"
        if isinstance(message, Ask):
            after = self._send(taken, r, peer, Here(message.about, me.entered, me.inside > 0))
        elif isinstance(message, Here):
            after = taken
            stale = message.about != me.inside and self.without != "answers without their question"
            if me.answers is not None and not stale:
                answers = tuple(sorted({**dict(me.answers), peer: message}.items()))
                after = self._with(taken, r, me._replace(answers=answers))
        elif isinstance(message, Bye):
            left = tuple(sorted({**dict(me.left), peer: message.entered}.items()))
            after = self._with(taken, r, me._replace(left=left))
        elif isinstance(message, End):
            gone = me.gone if self.without == "ends are not noticed" else me.gone | {peer}
            after = self._with(taken, r, me._replace(gone=gone))
        else:
            after = self._set(taken, r, message, tell=False)
        return Step(who, what, after)

    def _on_time(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        if me.fault:
            return
        left = dict(me.left)
        if gone := me.gone - set(left):
            fault = Fault("LOST", r, gone)
            yield Step(who, f"finds {_text(fault)}", self._set(state, r, fault))
            return
        if missing := frozenset(p for p, entered in me.left if me.inside and entered < me.inside):
            fault = Fault("LOST", r, missing)
            yield Step(who, f"finds {_text(fault)}", self._set(state, r, fault))
            return
        if not me.inside or not me.late:
            return
        here = [p for p in range(self.world) if p != r and p not in left and p not in me.gone]
        if me.answers is None:
            there = frozenset(p for p in here if state.rank[p].entered >= me.inside)
            after = self._with(state, r, me._replace(answers=(), there=there))
            for peer in here:
                after = self._send(after, r, peer, Ask(me.inside))
            yield Step(who, f"asks {ranks(here)}", after)
            return
        silent = [p for p in here if p not in dict(me.answers)]
        # Who runs answers in time.
        if all(state.rank[p].life == STOPPED for p in silent) or self.without == "no wait for the answers":
            fault = self._verdict(r, me)
            yield Step(who, f"finds {_text(fault)}", self._set(state, r, fault))

    def _verdict(self, r: int, me: Rank) -> Fault:
        answers, left = dict(me.answers or ()), dict(me.left)
        others = [p for p in range(self.world) if p != r and p not in left]
        silent = {p for p in others if p not in answers}
        absent = silent | {p for p, a in answers.items() if a.entered < me.inside and not a.inside}
        late = {p for p, a in answers.items() if a.entered < me.inside and a.inside}
        dead = {p for p, entered in left.items() if entered < me.inside}
        culprits = (dead | absent) or late  # who is in an earlier collective waits for these
        return Fault("TIMEOUT", r, frozenset(culprits & set(others) | dead))

    # --- faults, and what must hold ------------------------------------------------------------------------

    def _faults(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        if me.life == STOPPED:
            yield Step(
                "fault", f"rank {r} continues", self._with(state, r, me._replace(life=RUNS)), fair=False
            )
        if me.life != RUNS or me.closed:
            return
        waits = me.inside and not me.fault and not me.late and r < self.impatient
        if waits and ("late" in self.faults or (state.cause and state.cause[0] == "stopped")):
            late = self._with(state, r, me._replace(late=True))._replace(cause=state.cause or ("late", r))
            yield Step("time", f"the deadline of rank {r} passes", late, fair=state.cause is not None)
        if state.cause:
            return
        if "killed" in self.faults:
            dead = self._with(state, r, me._replace(life=DEAD))._replace(cause=("killed", r))
            for peer in range(self.world):
                dead = self._send(dead, r, peer, End())
            yield Step("fault", f"rank {r} is killed", dead, fair=False)
        if "stopped" in self.faults:
            stopped = self._with(state, r, me._replace(life=STOPPED))._replace(cause=("stopped", r))
            yield Step("fault", f"rank {r} is stopped", stopped, fair=False)
        if "aborts" in self.faults and not me.fault and not me.telling:
            after = self._set(state._replace(cause=("aborts", r)), r, Fault("ABORTED", r, frozenset({r})))
            yield Step("fault", f"rank {r} aborts", after, fair=False)
        if "leaves" in self.faults and not me.inside and me.done < self.collectives and not me.fault:
            after = self._close(state._replace(cause=("leaves", r)), r, me)
            yield Step("fault", f"rank {r} finalizes too early", after, fair=False)

    def _untruthful(self, state: State, r: int, fault: Fault) -> str:
        if state.cause is None:
            return f"rank {r} has {_text(fault)} although nothing went wrong"
        kind, of = state.cause
        if kind in ("killed", "aborts", "leaves"):
            # Another rank may have been late as well.
            right = fault.culprits == {of} or (fault.code == "TIMEOUT" and of not in fault.culprits)
            if not right:
                return f"rank {r} has {_text(fault)}, but rank {of} {kind}"
        elif fault.code != "TIMEOUT":
            return f"rank {r} has {_text(fault)}, but no rank is gone"
        if fault.code == "TIMEOUT" and fault.by == r:
            me = state.rank[r]
            for p in fault.culprits & me.there:
                if p in dict(me.answers or ()) or state.rank[p].life == RUNS:
                    return f"rank {r} blames rank {p}, which had entered the collective when it asked"
        return ""

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        if state.cause and state.cause[0] in ("killed", "aborts", "leaves"):
            codes = {me.fault.code for me in state.rank if me.fault}
            if len(codes) > 1 and "TIMEOUT" not in codes:
                return "the ranks have faults of different kinds"
        if self.without == "two verdicts at one time":
            named = sorted({ranks(me.fault.culprits) for me in state.rank if me.fault})
            if len(named) > 1:
                return f"ranks name {' and '.join(named)}"
        for r, me in enumerate(state.rank):
            if me.raised and any(other.done > me.done + 1 for other in state.rank):
                return f"a rank completed a collective that rank {r} cannot have entered"
        return ""

    def over(self, state: State) -> bool:
        return all(me.closed or me.life != RUNS for me in state.rank)

    def show(self, state: State) -> Mapping[str, str]:
        columns = {}
        for r, me in enumerate(state.rank):
            at = (
                me.life
                if me.life != RUNS
                else "closed"
                if me.closed
                else f"in {me.inside}"
                if me.inside
                else "out"
            )
            columns[f"rank {r}"] = at
            columns[f"fault {r}"] = _text(me.fault) if me.fault else "-"
            wires = (f"{r}>{p}: {', '.join(map(_name, w))}" for p, w in enumerate(state.wires[r]) if w)
            columns[f"wires {r}"] = "; ".join(wires) or "-"
        return columns

    def _with(self, state: State, r: int, me: Rank) -> State:
        return state._replace(rank=put(state.rank, r, me))


def _text(fault: Fault) -> str:
    return f"{fault.code} {ranks(fault.culprits)}"


def _name(message: Message) -> str:
    if isinstance(message, Fault):
        return _text(message)
    number = f" {message.entered}" if isinstance(message, (Here, Bye)) else ""
    return type(message).__name__ + number


FAULTS = ("killed", "stopped", "aborts", "leaves", "late")


def small() -> Iterator[FaultChannels]:
    yield FaultChannels(2, 2)
    yield FaultChannels(2, 2, FAULTS)
    yield FaultChannels(3, 2)
    for fault in ("killed", "aborts", "leaves", "late"):
        yield FaultChannels(3, 1, (fault,), impatient=1)


def large() -> Iterator[FaultChannels]:
    yield FaultChannels(2, 3, ("late",))
    for fault in ("killed", "aborts", "leaves"):
        yield FaultChannels(3, 1, (fault, "late"), impatient=2)
        yield FaultChannels(3, 2, (fault,))
    yield FaultChannels(3, 1, ("stopped",), impatient=2)


def mutant(name: str) -> FaultChannels:
    world, collectives, faults = {
        "nobody is told": (2, 1, ("aborts",)),
        "goodbye without its number": (2, 1, ()),
        "ends are not noticed": (2, 1, ("killed",)),
        "no wait for the answers": (3, 1, ("late",)),
        "answers without their question": (2, 2, ("late",)),
        "goodbye of a rank that was told": (3, 1, ("aborts",)),
        "two verdicts at one time": (3, 1, ("late",)),
    }[name]
    return FaultChannels(world, collectives, faults, name, impatient=2)


PROTOCOL = Protocol("fault_channel", small, large, mutant, MUTANTS, limits=LIMITS)
