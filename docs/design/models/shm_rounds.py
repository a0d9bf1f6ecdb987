"""Model of the rounds of shared memory: csrc/shm/group.cpp and csrc/shm/collectives.cpp.

Each rank runs a program of operations. An operation is a list of atomic steps, which `_script` derives from
the methods of `Group`; README.md maps them to the code. What the model keeps of data is whose they are: a
slot holds (operation, chunk), a tensor the number of the operation for which the user has filled it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .checker import Model, Protocol, Step, put, ranks

HERE, LEFT, FAILED = "here", "finalized", "failed"
RUNS, STOPPED, DEAD = "runs", "stopped", "dead"
ALL = -1


class Op(NamedTuple):
    """An operation: a method of `Group`, the number of chunks, the root; and what odd ranks call instead."""

    method: str
    chunks: int = 1
    root: int = 0
    odd: tuple[int, ...] = ()  # ranks that call something else: a mismatch


class Fault(NamedTuple):
    code: str
    culprits: frozenset[int]


class Do(NamedTuple):
    """A step of an operation: what it does, in which chunk, and of which rank it needs the announcement."""

    what: str
    chunk: int = 0
    whom: int = ALL


class Announcement(NamedTuple):
    round: int = 0
    call: int = -1


class Rank(NamedTuple):
    """What only this rank knows.

    Attributes:
        op, at: the operation of the program, and the next step in it.
        round: the round it is in. agreed: the call that all ranks have announced.
        look: the ranks that a look has found missing, which are about to be judged.
        late: its deadline has passed. wrong: it has read data of something else. wrote: its output.
        warned: another rank had given up when this one began the operation.
        fault: why its communicator is broken. ended: it has left the program.
    """

    op: int = 0
    at: int = 0
    round: int = 0
    agreed: int = -1
    look: frozenset[int] = frozenset()
    late: bool = False
    wrong: bool = False
    wrote: bool = False
    warned: bool = False
    fault: Fault | None = None
    done: int = 0
    ended: bool = False


class State(NamedTuple):
    rank: tuple[Rank, ...]
    announced: tuple[tuple[Announcement, Announcement], ...]
    slot: tuple[tuple[object, object], ...]
    tensor: tuple[int, ...]
    control: tuple[str, ...]
    told: tuple[Fault | None, ...]
    life: tuple[str, ...]
    cause: tuple[str, int] | None
    broken: str


MUTANTS = {
    "no wait before staging": "a slot is filled while another rank still reads it",
    "published before staged": "a rank reads a slot that is not filled",
    "signatures not awaited": "a rank writes its output although another one calls something else",
    "no look at failures before announcing": "a late rank succeeds although the others have given up",
    "no look at failures after reading": "a rank returns data of a tensor that has been reused meanwhile",
    "offering rank does not wait": "a tensor is reused while another rank still reads it",
    "no second look at the word": "a rank is lost although it has announced the round before it left",
    "missing ranks not looked at again": "a rank that has finished and left is lost for one that waits for a"
    " third rank",
}


class ShmRounds(Model[State]):
    """The ranks of one communicator over one program, with one fault at most."""

    def __init__(
        self, world: int, program: tuple[Op, ...], faults: tuple[str, ...] = (), without: str = ""
    ) -> None:
        self.world, self.program, self.faults, self.without = world, program, faults, without
        ops = "+".join(f"{op.method}{'!' if op.odd else ''}" for op in program)
        self.title = f"shm rounds, {world} ranks, {ops}, {'/'.join(faults) or 'no faults'}"
        self._scripts = [[self._script(op, r) for op in program] for r in range(world)]

    def _script(self, op: Op, rank: int) -> tuple[Do, ...]:
        root = rank == op.root
        last = op.chunks - 1
        first = [Do("enter"), Do("check"), Do("publish"), Do("agree")]
        if op.method == "all_reduce":  # one_shot
            script = [*first, Do("read")]
            for n in range(1, op.chunks):
                script += [Do("enter", n), Do("publish", n), Do("await", n), Do("read", n)]
        elif op.method == "two_shot":
            script = [*first, Do("read and fold"), Do("enter without staging", 1), Do("publish", 1)]
            for r in range(self.world):
                if r != rank:
                    script += [Do("read share", 1, r)]
        elif op.method == "broadcast":
            script = [*first, Do("read", 0, op.root)]
            for n in range(1, op.chunks):
                script += [Do("enter", n), Do("publish", n)]
                script += [] if root else [Do("read", n, op.root)]
        elif op.method == "gather":
            script = [*first, *([Do("read")] if root else [])]
            for n in range(1, op.chunks):
                script += [Do("enter", n), Do("publish", n)]
                script += [Do("read", n, r) for r in range(self.world) if root and r != rank]
        else:  # tensors are read in place: open, then leave
            everybody = op.method == "direct all_gather"
            script = [*first]
            if everybody or not root:
                script += [Do("read tensor", 0, ALL if everybody else op.root)]
            script += [Do("check"), Do("enter without staging", 1), Do("publish", 1)]
            if everybody or root:
                script += [Do("await", 1)]
        if self.without == "published before staged":
            script = [d._replace(what="enter without staging") if d.what == "enter" else d for d in script]
            at = [i for i, d in enumerate(script) if d.what == "publish" and d.chunk <= last]
            for i in reversed(at):
                script.insert(i + 1, Do("stage", script[i].chunk))
        elif self.without == "signatures not awaited":
            at_agree, at_read = script.index(Do("agree")), script.index(Do("read"))
            script[at_agree], script[at_read] = script[at_read], script[at_agree]
        elif self.without == "no look at failures before announcing":
            script.remove(Do("check"))
        elif self.without == "no look at failures after reading":
            script = [d for i, d in enumerate(script) if d.what != "check" or i < 2]
        elif self.without == "offering rank does not wait":
            script = [d for d in script if d != Do("await", 1)]
        return (*script, Do("return"))

    def start(self) -> State:
        n = self.world
        announcements = (Announcement(), Announcement())
        return State(
            (Rank(),) * n, (announcements,) * n, ((None, None),) * n, (0,) * n, (HERE,) * n, (None,) * n,
            (RUNS,) * n, None, "",
        )  # fmt: skip

    # --- the steps of the ranks ------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        if state.broken:
            return
        for r, me in enumerate(state.rank):
            yield from self._faults(state, r, me)
            if state.life[r] == RUNS and not me.ended:
                yield from self._rank(state, r, me)

    def _rank(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        who = f"rank {r}"
        if me.op == len(self.program):
            control = state.control if state.control[r] == FAILED else put(state.control, r, LEFT)
            after = state._replace(control=control, rank=put(state.rank, r, me._replace(ended=True)))
            yield Step(who, "finalizes", after)
            return
        do = self._scripts[r][me.op][me.at]
        if me.look:
            yield self._judge(state, r, me, do)
            return
        if missing := self._missing(state, me, do):
            look = me._replace(look=missing)
            yield Step(who, f"looks: {ranks(missing)} missing", self._with(state, r, look))
            return
        yield from self._do(state, r, me, do)

    def _awaits(self, me: Rank, do: Do) -> tuple[int, ...]:
        """The ranks whose announcement of the current round a step needs: `await_round`."""
        everybody = tuple(range(self.world))
        if do.what in ("enter", "enter without staging"):
            return () if self.without == "no wait before staging" else everybody
        if do.what in ("agree", "await"):
            return everybody
        if do.chunk > 0 and do.what.startswith("read"):
            return everybody if do.whom == ALL else (do.whom,)
        return ()

    def _missing(self, state: State, me: Rank, do: Do) -> frozenset[int]:
        at = me.round % 2
        return frozenset(r for r in self._awaits(me, do) if state.announced[r][at].round != me.round)

    def _do(self, state: State, r: int, me: Rank, do: Do) -> Iterator[Step]:
        who, op = f"rank {r}", self.program[me.op]
        seen = [state.announced[p][me.round % 2].call for p in self._awaits(me, do)]
        if me.agreed >= 0 and any(call != me.agreed for call in seen):
            yield Step(who, "reports damage", state._replace(broken="memory that is whole counts as damaged"))
            return
        on = me._replace(at=me.at + 1)
        if do.what in ("enter", "enter without staging"):
            if me.fault:  # is_broken_
                yield Step(who, f"raises {_text(me.fault)}", self._raised(state, r, me, me.fault))
                return
            on = on._replace(round=me.round + 1, warned=me.warned or (not me.at and FAILED in state.control))
            staged = self._stage(state, r, me, me.round + 1, do) if do.what == "enter" else state.slot
            yield Step(who, f"enters round {on.round}", self._with(state, r, on)._replace(slot=staged))
        elif do.what == "stage":
            staged = self._stage(state, r, me, me.round, do)
            yield Step(who, "fills its slot", self._with(state, r, on)._replace(slot=staged))
        elif do.what == "check":  # peer_failure
            if FAILED in state.control:
                fault = self._must_stop(state, r, me._replace(late=False), frozenset())
                assert fault is not None
                yield Step(who, f"raises {_text(fault)}", self._raised(state, r, me, fault))
            else:
                yield Step(who, "sees no failure", self._with(state, r, on))
        elif do.what == "publish":
            call = me.op if r not in op.odd else 100 + me.op
            mine = put(state.announced[r], me.round % 2, Announcement(me.round, call))
            after = self._with(state, r, on._replace(agreed=-1 if not do.chunk else me.agreed))
            yield Step(
                who, f"announces round {me.round}", after._replace(announced=put(state.announced, r, mine))
            )
        elif do.what == "agree":
            yield self._agree(state, r, me, on, seen)
        elif do.what == "await":
            yield Step(who, f"has all of round {me.round}", self._with(state, r, on))
        elif do.what == "return":
            yield self._return(state, r, me)
        else:
            yield self._read(state, r, me, on, do)

    def _stage(
        self, state: State, r: int, me: Rank, round_: int, do: Do
    ) -> tuple[tuple[object, object], ...]:
        op = self.program[me.op]
        if op.method == "broadcast" and r != op.root:
            return state.slot
        if op.method.startswith("direct"):
            return state.slot
        return put(state.slot, r, put(state.slot[r], round_ % 2, (me.op, do.chunk)))

    def _agree(self, state: State, r: int, me: Rank, on: Rank, seen: list[int]) -> Step:
        if len(set(seen)) == 1:
            return Step(f"rank {r}", "agrees", self._with(state, r, on._replace(agreed=seen[0])))
        after = self._over(state, r, me, 0)
        if me.wrote:
            after = after._replace(broken=f"rank {r} wrote its output, and then found a mismatch")
        if not self.program[me.op].odd:
            after = after._replace(broken=f"rank {r} found a mismatch among equal calls")
        return Step(f"rank {r}", "raises MISMATCH", after)

    def _read(self, state: State, r: int, me: Rank, on: Rank, do: Do) -> Step:
        whom = [p for p in (range(self.world) if do.whom == ALL else [do.whom]) if p != r]
        if do.what == "read tensor":
            wrong = any(state.tensor[p] != me.op for p in whom)
        else:
            wrong = any(state.slot[p][me.round % 2] != (me.op, do.chunk) for p in whom)
        on = on._replace(wrong=me.wrong or wrong, wrote=True)
        after = self._with(state, r, on)
        if do.what == "read and fold":  # the result goes into the slot of the next round at once
            shared = put(state.slot[r], (me.round + 1) % 2, (me.op, 1))
            after = after._replace(slot=put(state.slot, r, shared))
        return Step(
            f"rank {r}", f"reads {'tensors' if 'tensor' in do.what else 'slots'} of {ranks(whom)}", after
        )

    def _return(self, state: State, r: int, me: Rank) -> Step:
        after = self._over(state, r, me, 1)
        if me.wrong:
            after = after._replace(broken=f"operation {me.op} of rank {r} returned data of something else")
        elif self.program[me.op].odd:
            after = after._replace(broken=f"rank {r} found no mismatch")
        elif me.warned:
            after = after._replace(
                broken=f"operation {me.op} of rank {r} succeeded, begun after another rank gave up"
            )
        return Step(f"rank {r}", f"returns from operation {me.op}", after)

    def _over(self, state: State, r: int, me: Rank, done: int) -> State:
        """The operation is over, and the communicator usable: the user fills the tensor for the next one."""
        after = Rank(me.op + 1, 0, me.round, me.agreed if done else -1, fault=me.fault, done=me.done + 1)
        return self._with(state, r, after)._replace(tensor=put(state.tensor, r, me.op + 1))

    # --- failures ----------------------------------------------------------------------------------------

    def _judge(self, state: State, r: int, me: Rank, do: Do) -> Step:
        """The rest of `stop`, and the second look of `Waiter::until` at the word it waits for."""
        who, missing = f"rank {r}", me.look
        me = me._replace(look=frozenset())
        at = me.round % 2
        odd = [p for p in missing if state.announced[p][at].round not in (me.round, max(0, me.round - 2))]
        if odd:
            return Step(
                who, "reports damage", state._replace(broken="memory that is whole counts as damaged")
            )
        fault = self._must_stop(state, r, me, missing)
        if fault is None:
            return Step(who, "goes on waiting", self._with(state, r, me))
        again = min(missing)
        came = [p for p in missing if state.announced[p][at].round == me.round]
        if again in came and self.without != "no second look at the word":
            return Step(who, f"finds that {again} has come", self._with(state, r, me))
        if (
            came
            and self.without not in ("missing ranks not looked at again", "no second look at the word")
            and fault.code == "LOST"
            and fault.culprits <= set(came)
        ):
            return Step(who, f"finds that {ranks(came)} have come", self._with(state, r, me))
        return Step(who, f"raises {_text(fault)}", self._raised(state, r, me, fault))

    def _must_stop(self, state: State, r: int, me: Rank, awaited: frozenset[int]) -> Fault | None:
        if me.fault:  # aborted_
            return me.fault
        failed = [p for p in range(self.world) if p != r and state.control[p] == FAILED]
        left = [p for p in sorted(awaited) if state.control[p] == LEFT]
        dead = frozenset(p for p in range(self.world) if state.life[p] == DEAD and state.control[p] == HERE)
        if dead:
            return Fault("LOST", dead)
        if failed:
            return state.told[failed[0]]
        if left:
            return Fault("LOST", frozenset(left[:1]))
        return Fault("TIMEOUT", awaited) if me.late else None

    def _raised(self, state: State, r: int, me: Rank, fault: Fault) -> State:
        """`break_group`; the user takes the error, fills the tensor anew, and finalizes."""
        after = self._break(state, r, fault)
        fault = after.rank[r].fault or fault
        ended = after.rank[r]._replace(ended=True, look=frozenset())
        return self._with(after, r, ended)._replace(tensor=put(state.tensor, r, -1))

    def _break(self, state: State, r: int, fault: Fault) -> State:
        me = state.rank[r]
        if me.fault:
            return state
        broken = self._untruthful(state, r, me, fault)
        return state._replace(
            rank=put(state.rank, r, me._replace(fault=fault)),
            control=put(state.control, r, FAILED),
            told=put(state.told, r, fault),
            broken=state.broken or broken,
        )

    def _untruthful(self, state: State, r: int, me: Rank, fault: Fault) -> str:
        if state.cause is None:
            return f"rank {r} raises {_text(fault)} although nothing went wrong"
        if not fault.culprits:
            return f"the fault of rank {r} names nobody"
        kind, of = state.cause
        if kind in ("killed", "aborts", "leaves") and fault.culprits != {of}:
            return f"rank {r} raises {_text(fault)}, but rank {of} {kind}"
        if others := [other for other in state.told if other not in (None, fault)]:
            return f"rank {r} raises {_text(fault)}, another rank {_text(others[0])}"
        return ""

    def _faults(self, state: State, r: int, me: Rank) -> Iterator[Step]:
        if state.life[r] == STOPPED:
            yield Step(
                "fault", f"rank {r} continues", state._replace(life=put(state.life, r, RUNS)), fair=False
            )
        if state.life[r] != RUNS or me.ended:
            return
        waits = bool(me.look) or (
            me.op < len(self.program) and bool(self._missing(state, me, self._scripts[r][me.op][me.at]))
        )
        if waits and not me.late and (state.cause or "late" in self.faults):
            late = self._with(state, r, me._replace(late=True))
            late = late._replace(cause=state.cause or ("late", r))
            yield Step("time", f"the deadline of rank {r} passes", late, fair=state.cause is not None)
        if state.cause:
            return
        if "killed" in self.faults:
            dead = state._replace(life=put(state.life, r, DEAD), cause=("killed", r))
            yield Step("fault", f"rank {r} is killed", dead, fair=False)
        if "stopped" in self.faults:
            stopped = state._replace(life=put(state.life, r, STOPPED), cause=("stopped", r))
            yield Step("fault", f"rank {r} is stopped", stopped, fair=False)
        if "aborts" in self.faults and me.op < len(self.program):
            after = self._break(state._replace(cause=("aborts", r)), r, Fault("ABORTED", frozenset({r})))
            yield Step("fault", f"rank {r} aborts", after, fair=False)
        if "leaves" in self.faults and me.at == 0 and me.op < len(self.program):
            gone = self._with(state, r, me._replace(ended=True))
            gone = gone._replace(control=put(state.control, r, LEFT), cause=("leaves", r))
            yield Step("fault", f"rank {r} finalizes too early", gone, fair=False)

    # --- what must hold ----------------------------------------------------------------------------------

    def violation(self, state: State) -> str:
        if state.broken:
            return state.broken
        for r, me in enumerate(state.rank):
            if me.fault and me.ended:
                for p, other in enumerate(state.rank):
                    if other.done > me.op + 1:
                        return f"rank {p} completed operation {me.op + 1}, which rank {r} cannot have begun"
        return ""

    def over(self, state: State) -> bool:
        return all(me.ended or life != RUNS for me, life in zip(state.rank, state.life, strict=True))

    def show(self, state: State) -> Mapping[str, str]:
        columns = {}
        for r, me in enumerate(state.rank):
            words = "/".join(str(a.round) for a in state.announced[r])
            slots = "/".join("-" if s is None else "{}.{}".format(*s) for s in state.slot[r])  # type: ignore[misc]
            at = "ended" if me.ended else f"op {me.op} round {me.round}"
            if state.life[r] != RUNS:
                at = state.life[r]
            columns[f"rank {r}"] = at
            columns[f"words {r}"] = words
            columns[f"slots {r}"] = slots
            columns[f"state {r}"] = state.control[r]
        return columns

    def _with(self, state: State, r: int, me: Rank) -> State:
        return state._replace(rank=put(state.rank, r, me))


def _text(fault: Fault) -> str:
    return f"{fault.code} {ranks(fault.culprits)}"


FAULTS = ("killed", "stopped", "aborts", "leaves", "late")
ONE, TWO = Op("all_reduce"), Op("all_reduce", 2)
GATHER, BROADCAST = Op("gather", 2), Op("broadcast", 2)
TWO_SHOT, IN_PLACE, ALL_IN_PLACE = Op("two_shot"), Op("direct broadcast"), Op("direct all_gather")
ODD = Op("all_reduce", odd=(1,))


def small() -> Iterator[ShmRounds]:
    for three in ((TWO, ONE, ONE), (ODD, TWO_SHOT, IN_PLACE), (BROADCAST, GATHER, ALL_IN_PLACE)):
        yield ShmRounds(2, three)
        yield ShmRounds(2, three[:2], FAULTS)
    for program in ((ONE, TWO_SHOT), (ODD, BROADCAST), (IN_PLACE, GATHER), (ALL_IN_PLACE, ONE)):
        yield ShmRounds(3, program)
    for fault in FAULTS:
        yield ShmRounds(3, (IN_PLACE,), (fault,))
    yield ShmRounds(3, (ONE, ONE), ("killed",))


def large() -> Iterator[ShmRounds]:
    methods = (ONE, TWO, TWO_SHOT, BROADCAST, GATHER, IN_PLACE, ALL_IN_PLACE, ODD)
    for first in methods:
        for second in methods:
            yield ShmRounds(2, (first, second, first), FAULTS)
            yield ShmRounds(3, (first, second, first))
    for method in methods:
        yield ShmRounds(3, (method,), FAULTS)
        yield ShmRounds(4, (method,))


def mutant(name: str) -> ShmRounds:
    none, stopped = (), ("stopped",)
    world, program, faults = {
        "no wait before staging": (2, (Op("broadcast", 3),), none),
        "published before staged": (2, (ONE,), none),
        "signatures not awaited": (2, (ODD,), none),
        "no look at failures before announcing": (2, (ONE,), ("late",)),
        "no look at failures after reading": (2, (IN_PLACE,), stopped),
        "offering rank does not wait": (2, (IN_PLACE,), none),
        "no second look at the word": (2, (ONE,), none),
        "missing ranks not looked at again": (3, (IN_PLACE,), none),
    }[name]
    return ShmRounds(world, program, faults, name)


PROTOCOL = Protocol("shm_rounds", small, large, mutant, MUTANTS)
