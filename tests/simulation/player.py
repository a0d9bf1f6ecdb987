"""Plays a program: each rank is a simulated process whose main thread carries out the operations in order.

A rank goes on after a `CommError` as a program would: it gives the communicator up, and leaves out whatever
needs it, except that a communicator which can be reconfigured may get ranks again.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import greenlet

import unicomm
from tests.comms.inside import engine, store
from unicomm.backends.registry import new_comm
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import CommError, PeerLostError
from unicomm.comms.execution.point_to_point import post
from unicomm.comms.failures.first_cause import GRACE, FirstCause
from unicomm.comms.failures.store_client import is_store_failure
from unicomm.comms.work import Work

from . import network, primitives, simulated_library
from .moved_data import all_came, collective, posts
from .program import Program
from .scheduler import Process, Scheduler, Stuck
from .simulated_store import Client, Server, base_store

_HANDLES = 40.0  # seconds that a rank waits for the other ranks' init handles
_CLOSING = 5.0  # seconds for finalize


@dataclasses.dataclass
class Record:
    """What one operation was on one rank. `members`: processes in order of rank. `store_failed`: whether the
    error came after a failure of the store. `reached`: when the rank came to each step of a meeting."""

    op: int
    rank: int
    members: list[int]
    began: float
    limit: float
    ended: float = float("inf")
    error: CommError | None = None
    bug: str = ""
    uid: str = ""
    said: Any = None
    parent_broken: bool = False
    store_failed: bool = False
    reached: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.ended < float("inf")


@dataclasses.dataclass
class Run:
    """The outcome of a program.

    Attributes:
        records: of all operations that ranks entered.
        died: when processes were killed. stops: (process, from, to). struck: processes whose connections were
            reset. cut_off: processes that lost the store. given_up: (process, communicator, when) of aborts
            in the program.
    """

    program: Program
    records: list[Record]
    stuck: Stuck | None = None
    died: dict[int, float] = dataclasses.field(default_factory=dict)
    stops: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    struck: set[int] = dataclasses.field(default_factory=set)
    cut_off: set[int] = dataclasses.field(default_factory=set)
    given_up: list[tuple[int, str, float]] = dataclasses.field(default_factory=list)
    trace: list[str] | None = None
    digest: int = 0
    steps: int = 0
    seconds: float = 0.0


def members_of(program: Program) -> Iterator[tuple[int, dict[str, Any], list[list[int]]]]:
    """Each operation with the groups of processes that take part, each in order of rank.

    Operations on communicators that do not exist, as after shrinking, have no group.
    """
    n = program["ranks"]
    known: dict[str, list[int]] = {}
    for i, op in enumerate(program["ops"]):
        comm = op["comm"]
        if op["op"] == "create":
            known[comm] = list(range(n))
        if comm not in known:
            yield i, op, []
            continue
        members = known[comm]
        if op["op"] == "split":
            parts = [[members[r] for r in part if r < len(members)] for part in op["parts"]]
            parts = [part for part in parts if part]
            if parts:
                known[op["child"]] = max(parts, key=len)
            yield i, op, parts
            continue
        if op["op"] == "reconf":
            known[comm] = members = [r for r in op["ranks"] if r < n]
        yield i, op, [members] if members else []


def play(program: Program, trace: bool = False) -> Run:
    """Runs a program to its end and returns what happened. `installation.installed` has to be in effect."""
    scheduler = Scheduler(program["schedule"], trace=trace)
    primitives.activate(scheduler)
    primitives.seed_secrets(program["schedule"])
    collecting = gc.isenabled()
    gc.disable()  # a collection at any moment could run destructors of the last run
    try:
        world = _World(program, scheduler)
        try:
            scheduler.run()
        except Stuck as stuck:
            world.run.stuck = stuck
        run = world.run
        run.trace, run.digest, run.steps = scheduler.trace, scheduler.digest, scheduler.steps
        run.seconds = scheduler.now - 1000.0
        scheduler.close()
        return run
    finally:
        primitives.deactivate()
        network.use(None)
        simulated_library.use(None)
        unicomm.comms.failures.open_communicators._open.clear()
        if collecting:
            gc.enable()


class _World:
    """The processes of one run, and what they share."""

    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        self.program, self.scheduler = program, scheduler
        self.run = Run(program, [])
        network_ = network.Network()
        network.use(network_)
        simulated_library.use(simulated_library.Fabric())
        self.network = network_
        self.processes = [Process(r) for r in range(program["ranks"])]
        host = program["host"]
        self.server = Server(self.processes[host] if 0 <= host < len(self.processes) else Process(-1))
        self.handles: dict[tuple[str, int], str] = {}
        self.steps = list(members_of(program))
        for process in self.processes:
            rank = _Rank(self, process)
            scheduler.spawn(process, f"p{process.number}", rank.main, awaited=True)

    def begins(self, process: Process, op: int) -> None:
        """Arms the faults that happen in this operation of the process."""
        for fault in self.program["faults"]:
            if fault["rank"] == process.number and fault["op"] == op:
                process.countdown.append([fault["after"], lambda fault=fault: self._strike(process, fault)])

    def _strike(self, process: Process, fault: dict[str, Any]) -> None:
        scheduler, run, kind = self.scheduler, self.run, fault["kind"]
        if kind == "kill":
            scheduler.kill(process)
            run.died[process.number] = scheduler.now
        elif kind == "stop":
            scheduler.stop(process, fault["seconds"])
            run.stops.append((process.number, scheduler.now, scheduler.now + fault["seconds"]))
        elif kind == "reset" and fault["peer"] < len(self.processes):
            if self.network.reset_between(process, self.processes[fault["peer"]]):
                scheduler.note(f"connections of {process.number} and {fault['peer']} are reset")
                run.struck |= {process.number, fault["peer"]}
        elif kind == "break store" and (client := process.owned.get("store")) is not None:
            scheduler.note(f"process {process.number} is cut off from the store")
            client.broken = True
            run.cut_off.add(process.number)


@dataclasses.dataclass
class _Held:
    """A communicator that a rank has. `open`: operations may be tried."""

    comm: Communicator
    reconf: bool
    open: bool = True
    gone: bool = False


class _Rank:
    """The program of one process."""

    def __init__(self, world: _World, process: Process) -> None:
        self._world, self._process = world, process
        self._me = process.number
        self._held: dict[str, _Held] = {}
        self._pending: list[tuple[Record, Work, _Held, Callable[[], str]]] = []

    def main(self) -> None:
        self._store = Client(self._world.server, self._process)
        self._process.owned["store"] = self._store
        for i, op, groups in self._world.steps:
            members = next((group for group in groups if self._me in group), None)
            self._world.begins(self._process, i)
            if self._pending and not (op["op"] == "coll" and op["later"]) and op["op"] != "final":
                self._flush()
            if members is not None:
                getattr(self, "_" + op["op"])(i, op, members)
            elif op["op"] == "reconf" and op["comm"] in self._held:
                self._finalize(i, op["comm"], [self._me])
        self._flush()
        for comm in list(self._held):
            self._finalize(len(self._world.steps), comm, [self._me])

    # --- operations ---------------------------------------------------------------------------------------

    def _create(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        def run(record: Record) -> None:
            comm = new_comm(
                "simulated",
                "cpu",
                op["name"],
                store=self._store,  # type: ignore[arg-type]
                rank=members.index(self._me),
                size=len(members),
                timeout=op["timeout"],
                enable_reconfigure=op["reconf"],
            )
            self._check_place(record, comm, members)
            self._held[op["comm"]] = _Held(comm, op["reconf"])
            if op["reconf"]:
                self._world.handles[op["comm"], self._me] = comm.get_init_handle()

        record = self._attempt(i, members, op["timeout"], run)
        if record.error is not None:
            self._world.handles[op["comm"], self._me] = ""

    def _coll(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._usable(op["comm"])
        if held is None:
            return
        call, check = collective(held.comm, op, members.index(self._me), len(members))

        def run(record: Record) -> None:
            work = call()
            if op["later"]:
                self._pending.append((record, work, held, check))
            else:
                record.bug = check()

        limit = op["timeout"] + sum(record.limit for record, *_ in self._pending)
        self._attempt(i, members, limit, run, held, async_op=op["later"])

    def _msgs(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._usable(op["comm"])
        if held is None:
            return
        me, rng = members.index(self._me), random.Random(f"{op['order']} {self._me}")
        op = {**op, "tag": 2 + i}
        messages = posts(op, me, len(members), rng)

        def run(record: Record) -> None:
            works: list[tuple[Work, Callable[[], str]]] = []
            failed: CommError | None = None
            try:
                for send, peer, tensor, tag, check in messages:
                    kind = "send" if send else "recv"
                    works.append((post(engine(held.comm), kind, tensor, peer, op["timeout"], tag), check))
            except CommError as error:
                failed = error
            rng.shuffle(works)
            for work, _ in works:
                if rng.random() < 0.2:
                    work.is_completed()
            for work, _ in works:
                try:
                    work.wait()
                except CommError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            record.bug = "; ".join(filter(None, (check() for _, check in works)))
            if op["any"]:
                record.bug = all_came(op, me, len(members), [p[2] for p in messages if not p[0]])

        self._attempt(i, members, op["timeout"], run, held)

    def _batch(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._usable(op["comm"])
        if held is None:
            return
        me = members.index(self._me)
        messages = posts({**op, "any": False}, me, len(members), random.Random(0))
        if not messages:
            return

        def run(record: Record) -> None:
            batch = held.comm.batch_op_create()
            for send, peer, tensor, _, _ in messages:
                (batch.send if send else batch.recv)(tensor, peer)
            batch.issue(async_op=False, timeout=op["timeout"])

        self._attempt(i, members, op["timeout"], run, held)

    def _split(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._usable(op["comm"])
        if held is None:
            return
        parent = self._parents(op["comm"], i)
        ranks = [parent.index(process) for process in members]

        def run(record: Record) -> None:
            child = held.comm.split(ranks, op["child"], timeout=op["timeout"])
            assert child is not None
            self._held[op["child"]] = _Held(child, False)
            self._check_place(record, child, members)

        record = self._attempt(i, members, op["timeout"], run)
        record.parent_broken = held.comm.is_aborted()
        if record.error is not None and record.parent_broken:
            self._give_up(held)

    def _reconf(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._held.get(op["comm"])
        if held is None or held.gone or not held.reconf:
            return
        end = primitives.current().now + _HANDLES
        handles = self._world.handles
        while not all((op["comm"], r) in handles for r in members) and primitives.current().now < end:
            primitives.current().sleep(0.02)
        texts = [handles.get((op["comm"], r), "") for r in members]
        held.open = False
        if not all(texts):
            return

        def run(record: Record) -> None:
            held.comm.reconfigure(op["uuid"], texts, timeout=op["timeout"])
            held.open = True
            self._check_place(record, held.comm, members)

        self._attempt(i, members, op["timeout"], run)

    def _cause(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._usable(op["comm"])
        if held is None or len(members) == 1:
            return
        if base_store(store(held.comm)) is not self._store:
            return  # the store of an epoch, which ends with the first rank's part in it
        comm, me = held.comm, members.index(self._me)

        def run(record: Record) -> None:
            uid = f"{comm.get_uid()}/{i}"
            cause = FirstCause(store(comm), uid, comm.get_name(), me, len(members))
            mine = PeerLostError(f"cause of {me}", culprits=[me])
            if me in op["knows"]:
                record.said = cause.publish(mine).culprits
                return
            told = cause.published(CommError("fallback"), GRACE)
            if told is None:
                cause.report()
                record.said = None
                cause.unreported([r for r in range(len(members)) if r != me])
            else:
                record.said = told.culprits

        self._attempt(i, members, 20.0, run)

    def _late(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        if op["rank"] == self._me:
            primitives.current().sleep(op["seconds"], "the program sleeps")

    def _abort(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        held = self._held.get(op["comm"])
        if held is None or held.gone or op["rank"] != self._me:
            return
        self._world.run.given_up.append((self._me, op["comm"], primitives.current().now))

        def run(record: Record) -> None:
            held.comm.abort()

        self._attempt(i, [self._me], _CLOSING, run)
        self._give_up(held)

    def _later(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        """Another thread aborts or finalizes the communicator while the program goes on."""
        held = self._held.get(op["comm"])
        if held is None or held.gone or op["rank"] != self._me:
            return
        self._world.run.given_up.append((self._me, op["comm"], primitives.current().now))
        record = Record(i, self._me, [self._me], primitives.current().now + op["after"], 2 * _CLOSING)
        self._world.run.records.append(record)

        def run() -> None:
            primitives.current().sleep(op["after"])
            try:
                held.comm.abort() if op["do"] == "abort" else held.comm.finalize(_CLOSING)
            except CommError as error:
                record.error = error
            except greenlet.GreenletExit:
                raise
            except BaseException:
                record.bug = traceback.format_exc()
            record.ended = primitives.current().now

        primitives.Thread(target=run, name=op["do"]).start()

    def _final(self, i: int, op: dict[str, Any], members: list[int]) -> None:
        if op["comm"] in self._held:
            self._finalize(i, op["comm"], [self._me])
        self._flush()

    # --- help ---------------------------------------------------------------------------------------------

    def _attempt(
        self,
        i: int,
        members: list[int],
        limit: float,
        run: Callable[[Record], None],
        held: _Held | None = None,
        async_op: bool = False,
    ) -> Record:
        scheduler = primitives.current()
        record = Record(i, self._me, members, scheduler.now, limit)
        self._process.owned["reached"] = record.reached
        self._world.run.records.append(record)
        scheduler.note(f"p{self._me} begins {i}")
        try:
            run(record)
        except CommError as error:
            self._failed(record, error)
        except greenlet.GreenletExit:
            raise
        except BaseException:
            record.bug = traceback.format_exc()
            scheduler.note(f"p{self._me} has a bug in {i}")
        if not async_op or record.error is not None or record.bug:
            record.ended = scheduler.now
        if held is not None and record.error is not None and not async_op:
            self._give_up(held)
        return record

    def _failed(self, record: Record, error: CommError) -> None:
        record.error = error.with_traceback(None)
        record.store_failed = _follows_from_the_store(error)
        error.__context__ = error.__cause__ = None
        primitives.current().note(f"p{self._me} fails {record.op}: {type(error).__name__}: {error.message}")

    def _flush(self) -> None:
        """Waits for all asynchronous operations."""
        pending, self._pending = self._pending, []
        failed: list[_Held] = []
        for record, work, held, check in pending:
            try:
                work.wait()
                record.bug = check()
            except CommError as error:
                self._failed(record, error)
                failed.append(held)
            except greenlet.GreenletExit:
                raise
            except BaseException:
                record.bug = traceback.format_exc()
            record.ended = primitives.current().now
        for held in failed:
            self._give_up(held)

    def _usable(self, comm: str) -> _Held | None:
        held = self._held.get(comm)
        return held if held is not None and held.open else None

    def _give_up(self, held: _Held) -> None:
        """Leaves a broken communicator; one that may be reconfigured stays."""
        held.open = False
        if not held.reconf and not held.gone:
            name = next(name for name, other in self._held.items() if other is held)
            self._finalize(-1, name, [self._me])

    def _finalize(self, i: int, name: str, members: list[int]) -> None:
        held = self._held[name]
        held.open = False
        if held.gone:
            return
        held.gone = True
        # In another order it may wait for asynchronous operations.
        limit = _CLOSING + sum(record.limit for record, *_ in self._pending)
        self._attempt(i, members, limit, lambda record: held.comm.finalize(_CLOSING))

    def _check_place(self, record: Record, comm: Communicator, members: list[int]) -> None:
        record.uid = comm.get_uid()
        place = comm.get_rank(), comm.get_size()
        if place != (members.index(self._me), len(members)):
            record.bug = f"rank and size are {place}, the members {members}"

    def _parents(self, comm: str, before: int) -> list[int]:
        """The members of a communicator when operation `before` runs."""
        found: list[int] = []
        for i, op, groups in self._world.steps:
            if i >= before:
                break
            if op["comm"] == comm and op["op"] in ("create", "reconf") and groups:
                found = groups[0]
            if op["op"] == "split" and op["child"] == comm and groups:
                found = next((group for group in groups if self._me in group), found)
        return found


def _follows_from_the_store(error: BaseException) -> bool:
    """Whether the store had failed before this error was found."""
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, CommError) and is_store_failure(before):
            return True
        before = before.__context__
    return False
