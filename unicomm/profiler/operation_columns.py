"""The operations of all ranks as columns, and their arrivals on one clock.

The rows come from traces (`load_traces`) or from the recorder's table (`from_recorder`); `join` compares the
ranks' arrivals and completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind, item_size
from unicomm.flight_recorder.formats.operation_names import kind as kind_of
from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring import reader as ring
from unicomm.flight_recorder.ring.reader import State
from unicomm.flight_recorder.table import clocks
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.texts import printable, tell_apart

from .chrome import NOTHING, Reader, TraceError, base_of
from .trace_table import KEY, REPLAY, TraceTable, read

_KEPT = 160  # bytes of a row in `Operations`
_MOST_BYTES = 1 << 45  # of an operation: so many of a million operations have a sum in 64 bits
_UNDESCRIBED = ("undefined", "default_pg")  # what torch says of groups that the program does not describe


@dataclass
class GroupOf:
    """A communicator.

    Attributes:
        name: what reports call it; no other group of the same `Operations` has it.
        description: what the program says of it, "" if it says nothing.
        ranks: its members' ranks in the whole job.
    """

    uid: str
    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass
class TraceFile:
    """One rank's trace, as far as it is known before its events are read."""

    path: Path
    rank: int
    host: str
    base_ns: int
    started_ns: int
    first_row: int = 0
    rows: int = 0
    dropped: int = 0


@dataclass
class Operations:
    """The operations of all ranks; one row for each operation of a rank, columns of one length.

    Attributes:
        rank, peer, root: ranks in the whole job; -1 where an operation has none.
        group, op, dtype: indices into `groups`, `ops`, `dtypes`.
        issued_ns, arrived_ns, completed_ns: times on the rank's own clock. `arrived_ns` is when the operation
            started, which may be later than its issue. `completed_ns` is 0 for an unfinished operation.
        bytes: the size of the larger side (inputs or outputs), all tensors together.
        thread, traced: the issuing thread, and whether torch's trace has an event of the operation.
        replay: the replay of a CUDA graph in which it ran, from 1; 0 for an operation that was called, -1 for
            one that was captured. A recorder does not tell graphs apart: there, replays of all are counted.
        captured_seq: for a replayed operation, the sequence number of its capture; for the row of a whole
            replay, that of its first collective. 0 from a recorder.
        stopped_ns: when each rank's recording ended.
        clocks: the name of each rank's clock, where it is known; ranks with one name share a clock.
    """

    rank: Column
    group: Column
    op: Column
    kind: Column
    seq: Column
    peer: Column
    root: Column
    issued_ns: Column
    arrived_ns: Column
    completed_ns: Column
    bytes: Column
    elements: Column
    dtype: Column
    is_async: Column
    thread: Column
    traced: Column
    replay: Column
    captured_seq: Column
    ops: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    groups: list[GroupOf] = field(default_factory=list)
    stopped_ns: dict[int, int] = field(default_factory=dict)
    clocks: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def ranks(self) -> Column:
        return np.unique(self.rank)

    @cached_property
    def whole_replay(self) -> Column:
        """Whether a row stands for a graph's replay, whose operations have rows of their own."""
        return np.asarray([op == REPLAY for op in self.ops] or [False], np.bool_)[self.op]

    @cached_property
    def placed(self) -> Column:
        """Whether the time of the operation is known.

        It is not known for captured operations, which ran nothing, nor for those of a replay: they ran at
        some time within the replay.
        """
        placed: Column = (self.replay == 0) | self.whole_replay
        return placed

    @cached_property
    def cell(self) -> Column:
        """A number that the rows of one collective share, and a send and its receive.

        Rows of whole replays share it when the replays begin with the same collective.
        """
        source = np.where(self.kind == OpKind.RECV, self.peer, self.rank).astype(np.int64)
        target = np.where(self.kind == OpKind.RECV, self.rank, self.peer).astype(np.int64)
        collective = self.kind == OpKind.COLLECTIVE
        source[collective] = target[collective] = -1
        # A message received from any source has no sequence number and therefore no partner.
        lone = (~collective & (self.peer < 0)) | (self.seq <= 0)
        seq = np.where(lone, -1 - np.arange(len(self)), self.seq)
        return dense(self.group.astype(np.int64), self.placed.astype(np.int64), source, target, seq)


def dense(*columns: Column) -> Column:
    """Numbers the distinct rows of some columns of integers, from 0 in ascending order."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    code, size = np.zeros(len(columns[0]), np.int64), 1
    for one in columns:
        column = one
        low, high = int(column.min()), int(column.max())
        if size * (high - low + 1) >= 1 << 62:  # too large for one integer: number the distinct values first
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
            column = np.unique(column, return_inverse=True)[1].reshape(-1)
            low, high, size = 0, int(column.max()), int(code.max()) + 1
        code = code * (high - low + 1) + (column - low)
        size *= high - low + 1
    return np.unique(code, return_inverse=True)[1].reshape(-1)


def alike(*columns: Column) -> Iterator[Column]:
    """Yields the positions of the rows that are equal in all these columns, one group after the other."""
    if not len(columns[0]):
        return
    kind = dense(*(column.astype(np.int64) for column in columns))
    yield from np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1])


def _empty() -> Operations:
    none = np.zeros(0, np.int64)
    return Operations(*(none,) * 18, [], [], [], {})


class _Gatherer:
    def __init__(self) -> None:
        self.parts: list[dict[str, Column]] = []
        self.ops: dict[str, int] = {}
        self.dtypes: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.found = _empty()
        self.length = 0

    def group(self, one: GroupOf) -> int:
        index = self.groups.setdefault(one.uid, len(self.groups))
        if index == len(self.found.groups):
            one.description = "" if one.description in _UNDESCRIBED else one.description
            self.found.groups.append(one)
        elif self.found.groups[index].ranks != one.ranks:
            raise TraceError(
                f"two ranks disagree on the members of '{one.name}' ({one.uid}): are the traces of one run?"
            )
        return index

    def add(self, rank: int, table: TraceTable) -> int:
        """Adds the rows of one trace and returns their number."""
        groups = [self.group(GroupOf(g.uid, g.name, g.description, g.ranks)) for g in table.groups]
        n = len(table)

        def ints(name: str) -> Column:
            return np.fromiter(table.columns[name], np.int64, n)

        def indices(name: str, known: dict[str, int]) -> Column:
            texts = table.columns[name]
            number = {text: known.setdefault(text, len(known)) for text in dict.fromkeys(texts)}
            return np.fromiter(map(number.__getitem__, texts), np.int32, n)

        of = ints("group")
        issued, started = ints("issued_ns"), ints("started_ns")
        root, peer = ints("root"), ints("peer")
        members = [np.asarray(g.ranks, np.int64) for g in table.groups]
        for index, ranks in enumerate(members):
            for column in (root, peer):
                mine = (of == index) & (column >= 0) & (column < len(ranks))
                column[mine] = ranks[column[mine]]
        owners = np.asarray([g.global_rank for g in table.groups] or [rank], np.int64)
        ops = table.columns["op"]
        kinds = {op: int(kind_of(op)) for op in set(ops)}
        self.parts.append(
            {
                # One trace holds several ranks when they are threads of one process.
                "rank": owners[of],
                "group": np.asarray(groups or [0], np.int32)[of],
                "op": indices("op", self.ops),
                "kind": np.fromiter(map(kinds.__getitem__, ops), np.uint8, n),
                "seq": ints("seq_num"),
                "peer": peer,
                "root": root,
                "issued_ns": issued,
                "arrived_ns": np.where(started > 0, started, issued),
                "completed_ns": ints("completed_ns"),
                "bytes": ints("bytes"),
                "elements": np.maximum(ints("in_elements"), ints("out_elements")),
                "dtype": indices("dtype", self.dtypes),
                "is_async": ints("is_async").astype(np.bool_),
                "thread": ints("thread"),
                "traced": ints("traced").astype(np.bool_),
                "replay": ints("replay"),
                "captured_seq": ints("captured_seq"),
            }
        )
        for owner in {rank, *owners.tolist()}:
            self.found.stopped_ns[int(owner)] = table.stopped_ns
            self.found.clocks[int(owner)] = table.clock or f"of the {len(self.parts)}. recording"
        return n

    def finish(self) -> Operations:
        found = self.found
        for name in self.parts[0] if self.parts else ():
            setattr(found, name, np.concatenate([part[name] for part in self.parts]))
        found.ops, found.dtypes = list(map(printable, self.ops)), list(map(printable, self.dtypes))
        names = tell_apart([(printable(g.name), g.ranks, "") for g in found.groups])
        for group, name in zip(found.groups, names, strict=True):
            group.name, group.uid, group.description = (
                name,
                printable(group.uid),
                printable(group.description),
            )
        return found


def load_traces(paths: Sequence[Path], memory: Memory | None = None) -> tuple[list[TraceFile], Operations]:
    """Reads the tables of one trace per rank; returns the files by rank, and all operations.

    Raises `TraceError`, also when the traces need more than `memory`.
    """
    memory = Memory(None, TraceError) if memory is None else memory
    if not paths:
        raise TraceError("no traces given")
    files: list[TraceFile] = []
    tables: dict[int, TraceTable] = {}
    gatherer = _Gatherer()
    for path in paths:
        if path.is_dir():
            raise TraceError(f"{path} is a folder; give the traces in it: {path}/*.json")
        with Reader(path, memory=memory) as reader:
            data = reader.head.get(KEY)
            if data is None:  # a tool has sorted the keys: the table comes after the events
                for _ in reader.pieces_as(NOTHING):
                    pass
                data = reader.tail.get(KEY)
            base = base_of(reader.head | reader.tail, path)
        if data is None:
            raise TraceError(
                f"{path} holds no table of unicomm, so its operations cannot be matched with those of other"
                " ranks; profile a program that uses unicomm, with a communicator that lives until the"
                " profiler stops"
            )
        table = read(data, str(path))
        data = None
        reader.forget()
        memory.take(_KEPT * len(table), path)
        same = next((f.path for f in files if f.rank == table.rank), None)
        if same is not None:
            raise TraceError(
                f"{path} and {same} are both of rank {table.rank}: {_twice(tables[table.rank], table)}"
            )
        times = (base, table.started_ns)
        files.append(TraceFile(Path(path), table.rank, printable(table.host), *times, gatherer.length))
        files[-1].rows = gatherer.add(table.rank, table)
        files[-1].dropped = table.dropped
        gatherer.length += files[-1].rows
        table.columns, table.groups = {}, []  # gathered; what is left says whose trace it is
        tables[table.rank] = table
    return sorted(files, key=lambda f: f.rank), gatherer.finish()


def _twice(one: TraceTable, other: TraceTable) -> str:
    """Says why two traces have the same rank."""
    if (one.host, one.pid, one.started_ns) == (other.host, other.pid, other.started_ns):
        return "the same recording twice; leave one out"
    if (one.host, one.pid) == (other.host, other.pid):
        return "two recordings (cycles) of one process; give one trace a rank, all of the same cycle"
    return "of two processes: two runs, or before and after a restart; give one trace a rank, all of one run"


def from_recorder(table: Table) -> Operations:
    """Returns the operations of rings or dumps whose group and time are known.

    As in traces, each replay of a graph has a row of its own, which has the time of the replay's operations.
    """
    kind, call, calls = table.kind, table.call, table.calls
    replay, heads = _replays(table)
    elements = np.maximum(calls.in_numel, calls.out_numel)
    dtype = np.where(calls.in_dtype > 0, calls.in_dtype, calls.out_dtype)
    width = np.asarray([item_size(name) if name else 0 for name in table.dtypes] or [0], np.int64)
    largest = _MOST_BYTES // np.maximum(width, 1)[dtype]  # a damaged dump may have any number
    size = (np.minimum(elements, largest) * width[dtype])[call]
    over = (table.state == State.COMPLETED) | (table.state == State.FAILED)
    last = {
        s.rank: max(s.as_of_ns, int(np.max(table.completed_ns[s.begin : s.end], initial=0)))
        for s in table.sources
        if s.rank >= 0
    }
    known = (table.group >= 0) & (table.created_ns > 0)
    single = np.flatnonzero(known & (kind != OpKind.OTHER))
    heads = heads[known[heads]]
    rows = np.concatenate([single, heads])
    whole = np.arange(len(rows)) >= len(single)

    def of_replays(values: Column) -> Column:
        """Returns `values` by row; for a replay, the sum over its operations."""
        out: Column = values[rows]
        out[whole] = _together(values, replay, heads)
        return out

    seq = table.seq[rows]
    seq[whole] = _first_collective(table, replay, heads)
    op = calls.op[call[rows]].astype(np.int64)
    op[whole] = len(table.ops)
    return Operations(
        rank=table.rank[rows],
        group=table.group[rows],
        op=op,
        kind=np.where(whole, int(kind_of(REPLAY)), kind[rows]),
        seq=seq,
        peer=np.where(whole, -1, table.peer[rows]),
        root=np.where(whole, -1, calls.root[call[rows]]),
        issued_ns=table.created_ns[rows],
        arrived_ns=np.where(table.started_ns > 0, table.started_ns, table.created_ns)[rows],
        completed_ns=np.where(over, table.completed_ns, 0)[rows],
        bytes=of_replays(size),
        elements=of_replays(elements[call]),
        dtype=dtype[call[rows]],
        is_async=table.is_async[rows],
        thread=np.zeros(len(rows), np.int64),
        traced=np.zeros(len(rows), np.bool_),
        replay=replay[rows],
        captured_seq=np.zeros(len(rows), np.int64),
        ops=[*table.ops, REPLAY],
        dtypes=table.dtypes,
        groups=[GroupOf(g.uid, g.name, g.desc, tuple(g.ranks.tolist())) for g in table.groups],
        stopped_ns=last,
    )


def _replays(table: Table) -> tuple[Column, Column]:
    """Returns the replay in which each row ran (see `Operations.replay`), and the first row of each replay.

    The rows of a replay follow each other among those of their rank and group. A replay whose first rows were
    overwritten begins with the first row that is left.
    """
    captured = (table.flags & ring.CAPTURED) != 0
    replayed = ((table.flags & ring.REPLAYED) != 0) & (table.group >= 0)
    replay = np.where(captured & ~replayed, -1, 0)
    order = np.lexsort((table.group, table.rank))  # stable: keeps the order of the calls
    rank, group, inside = table.rank[order], table.group[order], replayed[order]
    follows = np.zeros(len(order), np.bool_)
    follows[1:] = (rank[1:] == rank[:-1]) & (group[1:] == group[:-1]) & inside[:-1]
    begins = inside & (((table.flags[order] & ring.REPLAY) != 0) | ~follows)
    replay[order[inside]] = np.cumsum(begins)[inside]
    return replay, order[begins]


def _together(values: Column, replay: Column, heads: Column) -> Column:
    """Sums `values` over each of the replays that begin with `heads`."""
    sums = np.zeros(int(replay.max(initial=0)) + 1, np.int64)
    inside = np.flatnonzero(replay > 0)
    np.add.at(sums, replay[inside], values[inside])
    return sums[replay[heads]]


def _first_collective(table: Table, replay: Column, heads: Column) -> Column:
    """Returns the sequence number of each replay's first collective, 0 for a replay without one.

    The replays of different ranks are matched by it.
    """
    numbers = np.zeros(int(replay.max(initial=0)) + 1, np.int64)
    found = np.flatnonzero((replay > 0) & (table.kind == OpKind.COLLECTIVE) & (table.seq > 0))[::-1]
    numbers[replay[found]] = table.seq[found]  # the first is written last
    return numbers[replay[heads]]


@dataclass
class Joined:
    """Times of all rows on one clock, in nanoseconds since 1970.

    Rows whose time is not known (see `Operations.placed`) have no duration, no waiting and no lateness.

    Attributes:
        begin, end: when the rank arrived, and when the operation (or else the recording) ended.
        ready: when the last rank had arrived, limited to `begin` ... `end`. The rank waits before it and
            transfers after it. A send does not wait.
        late: how much later than the typical (lower median) rank this one arrived; negative for earlier.
        members: the number of ranks that have a row of the collective.
        last: whether this rank arrived last of several.
        open: whether the operation was unfinished when the recording ended.
    """

    begin: Column
    end: Column
    ready: Column
    late: Column
    members: Column
    last: Column
    open: Column

    @property
    def waiting(self) -> Column:
        return self.ready - self.begin

    @property
    def transfer(self) -> Column:
        return self.end - self.ready


def join(found: Operations, offsets: dict[int, int]) -> Joined:
    """Compares arrivals and completions of all ranks; `offsets`: the nanoseconds each clock is ahead."""
    if not len(found):
        none = np.zeros(0, np.int64)
        return Joined(none, none, none, none, none, none.astype(np.bool_), none.astype(np.bool_))
    most = int(found.ranks.max()) + 1
    shift, stop = np.zeros(most, np.int64), np.zeros(most, np.int64)
    for rank, offset in offsets.items():
        shift[rank] = offset
    for rank, at in found.stopped_ns.items():
        if 0 <= rank < most:
            stop[rank] = at
    own = shift[found.rank]
    begin = found.arrived_ns - own
    still = found.completed_ns == 0
    end = np.maximum(np.where(still, stop[found.rank], found.completed_ns) - own, begin)
    end = np.where(found.placed, end, begin)
    cells = found.cell
    count = int(cells.max()) + 1
    latest = np.zeros(count, np.int64)
    np.maximum.at(latest, cells, begin)
    members = np.bincount(cells, minlength=count)
    base = int(begin.min())
    typical = clocks.grouped_median((begin - base).astype(np.float64), cells, count)
    late = np.where(found.placed, begin - base - typical[cells].astype(np.int64), 0)
    ready = np.where(found.kind == OpKind.SEND, begin, np.clip(latest[cells], begin, end))
    collective = (found.kind == OpKind.COLLECTIVE) & found.placed
    last = collective & (members[cells] > 1) & (begin == latest[cells])
    return Joined(begin, end, ready, late, members[cells], last, still)
