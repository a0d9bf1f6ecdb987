"""SimulatedJob: programs of many ranks with faults, run on a simulated clock and recorded as rings.

Each rank runs its list of actions. A collective completes when all members of its group have joined it with
matching calls, and a message when both sides are there; until then a waiting rank is blocked. Each rank's
record is a ring in the format of ring/reader.py.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unicomm.flight_recorder.formats.dump_columns import from_dump
from unicomm.flight_recorder.formats.operation_names import COLLECTIVES
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.ring.reader import (
    ASYNC,
    COMM,
    COMPARED,
    ERRORS,
    FRAME,
    HEADER,
    INPUT_CHECKSUM,
    MAGIC,
    OUTPUT_CHECKSUM,
    P2P,
    RECEIVE,
    RECORD,
    VERSION,
    Ring,
    State,
)
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.flight_recorder.table.table import ENDED, KILLED, RUNNING, STOPPED, UNKNOWN, Table
from unicomm.flight_recorder.texts import format_ranks

_BEGAN_NS = 1_700_000_000_000_000_000
_US = 1000
_TRANSFER_US = 50.0
_AFTER_NS = 60_000_000_000  # from the last event to the reading of the rings
_OPS = ["send", "recv", *sorted(COLLECTIVES)]
_DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
_REDUCTIONS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG"]
_CODES = {
    table: {name: i for i, name in enumerate(names, 1)}
    for table, names in (("ops", _OPS), ("dtypes", _DTYPES), ("reductions", _REDUCTIONS))
}
_META_NAMES = {table: {str(i): name for name, i in codes.items()} for table, codes in _CODES.items()}
# The collectives whose results are the same on all ranks.
_ALIKE = frozenset({"all_reduce", "broadcast", "all_gather", "all_gather_v", "all_gather_single"})
_ERROR_CODES = {name: code for code, name in ERRORS.items()}
_FILE = "/job/train.py"


@dataclass(frozen=True)
class Action:
    """One action of a rank's program.

    Attributes:
        op: an operation; or "leave" (the process runs on, but issues nothing more), "die", "stop", "end" (the
            process ends by itself), or "sync" (waits for all operations that were issued without waiting).
        numel, out_numel: the elements of input and output; -1 for an output as large as the input.
        root: a rank of the group.
        peer: a rank of the job.
        line: the line of the program, shown in reports.
        work_us: the time that the rank works before the action.
        waits: whether the call returns only when the operation has completed.
        fate: "die" or "stop": what happens to the process inside the operation, before its contribution.
        loose: whether the operation completes even if the ranks' arguments differ.
        parts: the elements of each rank's part in an all_gather_v or reduce_scatter_v; only in dumps of NCCL.
        calls: the calls of a coalesced collective, whose `op` is "coalesced"; only in dumps of NCCL.
        batch: a number that neighbouring messages of one batch have in common; only in dumps of NCCL.
    """

    op: str
    group: str = "world"
    numel: int = 1024
    out_numel: int = -1
    dtype: str = "float32"
    red: str = ""
    root: int = -1
    peer: int = -1
    line: int = 10
    work_us: float = 1000.0
    waits: bool = True
    fate: str = ""
    loose: bool = False
    parts: tuple[int, ...] = ()
    calls: tuple[Action, ...] = ()
    batch: int = 0

    @property
    def terms(self) -> tuple[object, ...]:
        """The arguments in which the ranks must agree for the operation to complete."""
        if self.calls:
            return tuple(call.terms for call in self.calls)
        sized = self.op not in ("all_to_all_v_single", "all_gather_v", "reduce_scatter_v", "all_to_all")
        return (self.op, self.numel if sized else 0, self.dtype, self.red, self.root, self.parts)


@dataclass
class Event:
    """One record of a rank, with times on the simulated clock in nanoseconds, 0 for never."""

    call: Action
    seq: int
    created: int
    completed: int = 0
    started: bool = True
    error: str = ""


@dataclass
class SimulatedJob:
    """A job to simulate, and its events after `run`.

    Attributes:
        size: the number of ranks.
        programs: the actions of each rank.
        groups: the members in order, by name of the group.
        members: the members in the view of single ranks: (rank, group) -> members.
        late_us: the time that a rank works in addition before each action.
        skew_ns: the offset of a rank's clock.
        capacity: the number of records in a ring.
        stuck: the collectives (group, seq), and messages (group, sender, receiver, seq), that do not complete
            although all ranks join.
        partly: the ranks that complete the stuck collectives nevertheless.
        unstarted: the ranks that never start an operation that does not complete.
        one_at_a_time: whether the operations of a rank, of all its groups, run one after another in the order
            of issue, as kernels do that fill a device. Those behind a running one have not started.
        errors: the error with which waiting ranks fail at the end ("timeout", "peer lost", ...).
        checksums: whether records have checksums of their data.
        flips: the outputs with other bits than they should have: (rank, number of its operation from 0). An
            operation whose results the ranks compare is the last one if they differ: all its ranks fail.
        hosts: the number of ranks per host.
        live: whether the processes exist when the rings are read.
        endings: the ending files of the ranks, by name.
    """

    size: int
    programs: list[Sequence[Action]]
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    members: dict[tuple[int, str], Sequence[int]] = field(default_factory=dict)
    late_us: dict[int, float] = field(default_factory=dict)
    skew_ns: dict[int, int] = field(default_factory=dict)
    capacity: int = 1 << 16
    stuck: set[tuple[Any, ...]] = field(default_factory=set)
    partly: set[int] = field(default_factory=set)
    unstarted: set[int] = field(default_factory=set)
    one_at_a_time: bool = False
    errors: str = ""
    checksums: bool = False
    flips: set[tuple[int, int]] = field(default_factory=set)
    hosts: int = 8
    live: bool = False
    endings: dict[str, str] = field(default_factory=dict)
    seed: int = 1
    events: list[list[Event]] = field(default_factory=list)
    fates: dict[int, str] = field(default_factory=dict)
    end_ns: int = 0

    def __post_init__(self) -> None:
        self.groups = {"world": range(self.size), **self.groups}

    def replace_call(self, rank: int, at: int, *calls: Action) -> None:
        """Replaces action number `at` of a rank by `calls`; without `calls` it is left out."""
        own = list(self.programs[rank])
        own[at : at + 1] = calls
        self.programs[rank] = own

    def change(self, rank: int, at: int, **what: Any) -> None:
        """Changes fields of action number `at` of a rank."""
        self.replace_call(rank, at, replace(self.programs[rank][at], **what))

    # --- running -----------------------------------------------------------------------------------

    def run(self) -> SimulatedJob:
        """Runs the programs until all ranks have ended or are blocked."""
        rng = np.random.default_rng(self.seed)
        jitter = rng.uniform(0.0, 5.0, (self.size, 16))
        self.events = [[] for _ in range(self.size)]
        self._at = [0] * self.size
        self._clock = [0.0] * self.size
        self._seq: list[dict[object, int]] = [defaultdict(int) for _ in range(self.size)]
        self._open: list[int] = [0] * self.size  # unfinished operations
        self._queue: list[deque[tuple[tuple[object, ...], Event]]] = [deque() for _ in range(self.size)]
        self._blocked: list[object] = [None] * self.size
        self._arrived: dict[tuple[object, ...], dict[int, Event]] = defaultdict(dict)  # by operation and rank
        ready = list(range(self.size - 1, -1, -1))
        while ready:
            rank = ready.pop()
            while self._blocked[rank] is None and self._at[rank] < len(self.programs[rank]):
                at = self._at[rank]
                self._at[rank] += 1
                work = float(jitter[rank, at % 16]) + self.late_us.get(rank, 0.0)
                ready += self._step(rank, self.programs[rank][at], work)
        self.end_ns = int(max(self._clock) * _US) + _AFTER_NS
        for rank, events in enumerate(self.events):
            for event in events:
                if not event.completed and self.errors and rank not in self.fates:
                    event.error = self.errors
                if not event.completed and rank in self.unstarted:
                    event.started = False
        return self

    def _step(self, rank: int, call: Action, more_us: float) -> list[int]:
        """Runs one action. Returns the ranks that it unblocks."""
        self._clock[rank] += call.work_us + more_us
        if call.op in ("leave", "die", "stop", "end"):
            self._fall(rank, call.op)
            return []
        if call.op == "sync":
            if self._open[rank]:
                self._blocked[rank] = "sync"
            return []
        message = call.op in ("send", "recv")
        if message:
            pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
            channel: object = (call.group, call.op, pair)
        else:
            channel = call.group
        self._seq[rank][channel] += 1
        seq = self._seq[rank][channel]
        event = Event(call, seq, int(self._clock[rank] * _US))
        self.events[rank].append(event)
        if call.fate:
            self._fall(rank, call.fate)
            return []
        key = (call.group, *pair, seq) if message else (call.group, seq)
        self._open[rank] += 1
        if call.waits:
            self._blocked[rank] = key
        if self.one_at_a_time and self._open[rank] > 1:
            event.started = False
            self._queue[rank].append((key, event))
            return []
        return self._join(rank, key, event)

    def _join(self, rank: int, key: tuple[object, ...], event: Event) -> list[int]:
        """Adds a rank to an operation. Returns the ranks that its completion unblocks."""
        arrived = self._arrived[key]
        arrived[rank] = event
        message = event.call.op in ("send", "recv")
        expected = 2 if message else len(self.groups[event.call.group])
        return self._complete(key, arrived, message) if len(arrived) == expected else []

    def _fall(self, rank: int, fate: str) -> None:
        self._blocked[rank] = fate
        self.fates[rank] = fate

    def _complete(self, key: tuple[object, ...], arrived: dict[int, Event], message: bool) -> list[int]:
        calls = [e.call for e in arrived.values()]
        agree = len({(c.numel, c.dtype) if message else c.terms for c in calls}) == 1
        held = key in self.stuck
        if (not agree and not any(c.loose for c in calls)) or (held and not self.partly):
            return []
        over = max(self._clock[r] if self._blocked[r] == key else e.created / _US for r, e in arrived.items())
        over += _TRANSFER_US
        freed = []
        for rank, event in arrived.items():
            if held and rank not in self.partly:
                continue
            event.completed = int(over * _US)
            self._open[rank] -= 1
            if self._blocked[rank] == key or (self._blocked[rank] == "sync" and not self._open[rank]):
                self._blocked[rank] = None
                self._clock[rank] = max(self._clock[rank], over)
                freed.append(rank)
        for rank, event in arrived.items():
            if self._queue[rank] and event.completed:
                following, event_behind = self._queue[rank].popleft()
                event_behind.started = True
                freed += self._join(rank, following, event_behind)
        return freed

    # --- rings and dumps ---------------------------------------------------------------------------

    def process(self, rank: int) -> str:
        """The state of a rank's process when the rings are read."""
        fate = self.fates.get(rank, "")
        if not self.live:
            return UNKNOWN
        return {"die": KILLED, "stop": STOPPED, "end": ENDED}.get(fate, RUNNING)

    def ring(self, rank: int) -> bytes:
        """Returns the bytes of a rank's ring."""
        return _Writer(self, rank).data()

    def add_to(self, builder: TableBuilder, rank: int, as_dump: bool = False, status: bool = True) -> None:
        """Adds one rank as a ring or a dump; `status`: whether the dump has the status of the groups."""
        ring = Ring(self.ring(rank), f"rank{rank}.ucring")
        if as_dump:
            dump = to_dict(ring)
            dump["pg_status"] = dump["pg_status"] if status else {}
            builder.add_dump(from_dump(dump), f"rank_{rank}", rank, "torch pickle")
        else:
            builder.add_ring(
                ring, process=self.process(rank), as_of_ns=self.end_ns + _BEGAN_NS if self.live else 0
            )

    def table(self, without: Sequence[int] = (), as_dump: bool = False, status: bool = True) -> Table:
        """Returns the table of all ranks except `without`; see `add_to` for the other arguments."""
        builder = TableBuilder()
        missing = set(without)
        for rank in range(self.size):
            if rank not in missing:
                self.add_to(builder, rank, as_dump, status)
        for name, text in self.endings.items():
            builder.endings.add(name, text.encode())
        return builder.finish()


def _number(what: tuple[object, ...], seq: int) -> int:
    """A number that stands for the data of an operation."""
    return zlib.crc32(repr((*what, seq)).encode()) * 0x9E3779B97F4A7C15 % (1 << 64)


class _Writer:
    """Writes one rank's ring."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.heap = bytearray(b"\0")

    def _text(self, text: str) -> tuple[int, int]:
        data = text.encode()
        at = self.heap.find(data) if len(data) < 64 else -1
        if at < 0:
            at = len(self.heap)
            self.heap += data
        return at, len(data)

    def data(self) -> bytes:
        job, rank = self.job, self.rank
        events = job.events[rank]
        own = [name for name, ranks in job.groups.items() if rank in ranks]
        comm_of = {name: i for i, name in enumerate(own)}
        places: dict[tuple[int, str], int] = {}
        for event in events:
            places.setdefault((event.call.line, event.call.op), len(places) + 1)
        records = self._records(events, comm_of, places)
        comms = self._comms(events, own)
        frames = np.zeros(len(places), FRAME)
        for (line, _), number in places.items():
            frames[number - 1]["file"] = self._text(_FILE)
            frames[number - 1]["function"] = self._text("train_step")
            frames[number - 1]["line"] = line
        meta = json.dumps(
            {
                **_META_NAMES,
                "host": f"node{rank // job.hosts}",
                "boot_id": "simulated",
                "local": [rank % job.hosts, min(job.hosts, job.size)],
            }
        ).encode()
        meta += b" " * (-len(meta) % 64)
        heap = bytes(self.heap) + b"\0" * (-len(self.heap) % 64)
        values: dict[str, Any] = {
            "magic": MAGIC,
            "version": VERSION,
            "header_bytes": HEADER.itemsize,
            "pid": 10_000 + rank,
            "rank": rank,
            "world": job.size,
            "start_mono_ns": 1,
            "start_real_ns": _BEGAN_NS + job.skew_ns.get(rank, 0) + 1,
            "rec_next": len(events),
            "comm_count": len(comms),
            "frame_count": len(frames),
            "meta_len": len(meta),
            "heap_cap": len(heap),
            "heap_used": len(heap),
        }
        for name, table in (("comm", comms), ("frame", frames), ("rec", records)):
            values |= {f"{name}_cap": len(table), f"{name}_size": table.itemsize}
        pieces = {"meta": meta, "comm": comms.tobytes(), "frame": frames.tobytes(), "heap": heap}
        pieces["rec"] = records.tobytes()
        at = HEADER.itemsize
        for name, piece in pieces.items():
            values[f"{name}_off"] = at
            at += len(piece)
        head = np.zeros(1, HEADER)
        for key, value in (values | {"file_bytes": at}).items():
            head[key] = value
        return b"".join([head.tobytes(), *pieces.values()])

    def _comms(self, events: list[Event], own: list[str]) -> Any:
        comms = np.zeros(len(own), COMM)
        for i, name in enumerate(own):
            ranks = self.job.groups[name]
            members = self.job.members.get((self.rank, name), ranks)
            collective = [e for e in events if e.call.group == name and e.call.op not in ("send", "recv")]
            row = comms[i]
            row["name"], row["backend"] = self._text(name), self._text("shm")
            row["uid"], row["ranks"] = self._text(f"uid-{name}"), self._text(format_ranks(members))
            row["rank"], row["size"], row["state"] = ranks.index(self.rank), len(members), 1
            row["coll_created"] = max((e.seq for e in collective), default=0)
            row["coll_started"] = max((e.seq for e in collective if e.started), default=0)
            row["coll_completed"] = max((e.seq for e in collective if e.completed), default=0)
        return comms

    def _records(
        self, events: list[Event], comm_of: dict[str, int], places: dict[tuple[int, str], int]
    ) -> Any:
        cap = min(max(len(events), 1), self.job.capacity)
        records = np.zeros(cap, RECORD)
        first = max(0, len(events) - cap)
        for number in range(first, len(events)):
            event, row = events[number], records[number % cap]
            call = event.call
            message = call.op in ("send", "recv")
            row["id"], row["seq"], row["op_id"] = number + 1, event.seq, number + 1
            row["created_ns"] = event.created + 1
            row["started_ns"] = event.created + 1 if event.started else 0
            row["completed_ns"] = event.completed + 1 if event.completed else 0
            row["comm"], row["op"] = comm_of[call.group], _CODES["ops"][call.op]
            row["state"] = 3 if event.completed else 4 if event.error else 2 if event.started else 1
            row["error"] = _ERROR_CODES[event.error]
            row["red"] = _CODES["reductions"].get(call.red, 0)
            row["peer"] = self.job.groups[call.group].index(call.peer) if message else call.root
            row["frame"] = places[call.line, call.op]
            row["tid"] = 1
            receive = call.op == "recv"
            row["flags"] = (
                (P2P if message else 0) | (RECEIVE if receive else 0) | (0 if call.waits else ASYNC)
            )
            if call.op != "barrier":
                self._tensors(row, call, receive)
                if self.job.checksums:
                    self._checksums(row, event, number)
        return records

    def _checksums(self, row: Any, event: Event, number: int) -> None:
        """Sets the checksums of an operation: a message has one, and a result of all ranks has one."""
        call, rank = event.call, self.rank
        where = (call.group, rank, call.peer) if call.op == "send" else (call.group, call.peer, rank)
        alike, message = call.op in _ALIKE, call.op in ("send", "recv")
        result = _number(where if message else (call.group, "" if alike else rank), event.seq)
        flipped = (rank, number) in self.job.flips
        if call.op != "recv":
            row["flags"] |= INPUT_CHECKSUM
            row["input_checksum"] = result if message else _number((call.group, rank, "in"), event.seq)
        if call.op != "send" and event.completed:
            row["flags"] |= OUTPUT_CHECKSUM | (COMPARED if alike else 0)
            row["output_checksum"] = result ^ (1 << 5 if flipped else 0)
            if alike and any(self._flipped(r, event) for r in self.job.groups[call.group]):
                row["state"], row["error"] = State.FAILED, _ERROR_CODES["silent corruption"]

    def _flipped(self, rank: int, event: Event) -> bool:
        of = self.job.events[rank]
        return any(
            of[n].seq == event.seq and of[n].call.op == event.call.op for r, n in self.job.flips if r == rank
        )

    @staticmethod
    def _tensors(row: Any, call: Action, receive: bool) -> None:
        out = call.numel if call.out_numel < 0 else call.out_numel
        sides = (("out", call.numel),) if receive else (("in", call.numel), ("out", out))
        if call.op == "send":
            sides = sides[:1]
        for side, numel in sides:
            row[f"{side}_dtype"] = _CODES["dtypes"][call.dtype]
            row[f"{side}_numel"], row[f"n_{side}"], row[f"{side}_ndim"] = numel, 1, 1
            row[f"{side}_dims"][0] = numel
