"""The figures of a report: where the time of communication goes, and which ranks are late by how much.

They come from one trace per rank, or from the flight recorder's rings, without a profiler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.table.clocks import grouped_median
from unicomm.flight_recorder.table.table import Column
from unicomm.flight_recorder.texts import format_ranks

from .alignment import align, remarks
from .chrome import Progress, Reader, TraceError, all_nanoseconds
from .operation_columns import Joined, Operations, TraceFile, dense, from_recorder, join, load_traces
from .trace_table import REPLAY

_MOST_DELAYS = 10
_INTERVAL, _BUSY = 200, 24  # bytes of an interval while a trace is read, and afterwards
_HOW = {1: " (in replays)", -1: " (captured)"}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_NOT_COMPUTE = (
    "unicomm::",
    "c10d::",
    "_c10d_functional::",
    "c10d_functional::",
    "nccl",
    "record_param_comms",
)

# Bus bandwidth as NCCL's tests define it: the share of the operation's bytes that crosses a rank's link.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        (
            *("all_gather", "all_gather_v", "all_gather_single", "reduce_scatter", "reduce_scatter_v"),
            *("reduce_scatter_single", "all_to_all", "all_to_all_single", "all_to_all_v_single"),
            *("gather", "gather_single", "scatter"),
        ),
        lambda n: (n - 1) / n,
    ),
}


@dataclass
class OperationFigures:
    """The figures of one operation in one group. Times are in nanoseconds.

    Attributes:
        op: the operation. "replay" is the whole replay of a graph. "all_reduce (in replays)" counts the
            operations that ran in replays, "all_reduce (captured)" those that were captured.
        group: the name of the group, which no other group has; description: what the program says of it, ""
            if it says nothing; members: its ranks in the job as text ("0-3"); ranks: their number.
        timed: whether the operation has times of its own. The times of replayed and captured ones are 0.
        count: the number of collectives, or of the messages that all ranks together sent or received;
            unfinished: the number of these that did not complete on every rank.
        bytes: the bytes of one rank, all collectives together (the larger side of each), on average over the
            ranks; for messages the bytes of all `count` messages.
        time_ns, waiting_ns, transfer_ns: the time that a rank spent, on average over the ranks; a rank waits
            until the last rank has arrived, and transfers after that.
        median_ns: the median time of one operation.
        bus_bandwidth: bytes per second during transfers, as NCCL's tests define it; 0 if nothing moves.
        skew_ns, most_skew_ns: the median and the largest time from the first to the last arrival.
        late_rank: the rank that arrived last most often, -1 for messages; late_share: the share of operations
            in which it was last; late_ns: its median lateness in these, compared with the typical rank;
            late_cost_ns: the time that the other ranks lost by waiting for it.
        overlap: the share of the time in which the rank computed; None when it is not known.
    """

    group: str
    description: str
    members: str
    uid: str
    ranks: int
    op: str
    timed: bool
    count: int
    unfinished: int
    bytes: int
    time_ns: int
    waiting_ns: int
    transfer_ns: int
    median_ns: int
    bus_bandwidth: float
    skew_ns: int
    most_skew_ns: int
    late_rank: int
    late_share: float
    late_ns: int
    late_cost_ns: int
    overlap: float | None


@dataclass
class Delay:
    """The late arrival of a rank at one collective, `late_ns` after the typical one of the other ranks.

    `cost_ns` is the time that all others together waited for it.
    """

    rank: int
    group: str
    op: str
    seq: int
    late_ns: int
    cost_ns: int
    at_ns: int


@dataclass
class RankFigures:
    """The figures of one rank. `last` is the share of its collectives at which it arrived last."""

    rank: int
    operations: int
    communicating_ns: int
    waiting_ns: int
    last: float
    cost_ns: int
    clock_ns: int


@dataclass
class Report:
    """All figures. Operations are sorted by time (replayed ones follow their replays), delays by lateness.

    The first operation began at `begin_ns`, on the aligned clock; the last one ended `span_ns` later.
    `remarks` tell what is missing or uncertain, a sentence each.
    """

    source: str
    span_ns: int
    begin_ns: int = 0
    operations: list[OperationFigures] = field(default_factory=list)
    delays: list[Delay] = field(default_factory=list)
    ranks: list[RankFigures] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class _Busy:
    """The intervals in which a rank computed, disjoint, and the total time before each."""

    begin: Column
    end: Column
    before: Column

    def within(self, begin: Column, end: Column) -> Column:
        return self._until(end) - self._until(begin)

    def _until(self, at: Column) -> Column:
        if not len(self.begin):
            return np.zeros(len(at), np.int64)
        i = np.searchsorted(self.begin, at, side="right") - 1
        inside = np.clip(at, None, self.end[i]) - self.begin[i]
        return np.where(i >= 0, self.before[i] + inside, 0)


def report(
    inputs: Sequence[Path | str], progress: Progress | None = None, memory: int | None = None
) -> Report:
    """Returns the figures of Chrome traces (one per rank), or of rings and dumps of the flight recorder.

    `inputs` are their files or folders. Calls `progress(done, total)` with numbers of bytes.
    `memory`: bytes that traces, or unpacked archives, may need; half of the free memory if None. Raises
    `TraceError` when nothing can be read, or when the traces do not belong together.
    """
    paths = [Path(p) for p in inputs]
    missing = [p for p in paths if not p.exists()]
    if missing:
        raise TraceError(f"{missing[0]} does not exist")
    files: list[TraceFile] = []
    busy: dict[int, _Busy] = {}
    no_trace: list[TraceError] = []
    room = Memory(memory, TraceError)
    traces = any(p.is_file() and _is_trace(p, no_trace, room) for p in paths)
    if traces:
        files, found = load_traces(paths, room)
        source = f"{len(files)} trace{'s' * (len(files) != 1)}"
    else:
        found, source = _recorder(paths, progress, memory, no_trace)
    clocks = align(found)
    if traces:
        busy = _busy(files, clocks.offsets, progress, room)
    out = _figures(found, join(found, clocks.offsets), clocks.offsets, busy, source)
    out.remarks = remarks(found, clocks, files)
    return out


def _is_trace(path: Path, otherwise: list[TraceError], memory: Memory) -> bool:
    try:
        Reader(path, facts=False, memory=memory).close()
    except TraceError as error:
        otherwise.append(error)
        return False
    return True


def _recorder(
    paths: list[Path], progress: Progress | None, memory: int | None, no_trace: list[TraceError]
) -> tuple[Operations, str]:
    from unicomm.flight_recorder.ring.folder import FolderError
    from unicomm.flight_recorder.table.load import load_job

    try:
        table = load_job(paths, progress, memory)
    except FolderError as error:
        raise TraceError(str(error)) from None
    if not len(table):
        where = ", ".join(map(str, paths)) or "this user's folder"
        why = f": {table.remarks[0].message}" if table.remarks else ""
        if no_trace:
            raise TraceError(f"{no_trace[0]}. It is no ring or dump either{why}")
        raise TraceError(
            f"no trace of unicomm, ring or dump in {where}{why}; give one trace per rank (FOLDER/*.json), or"
            " the folder of the flight recorder (UNICOMM_TRACE_KEEP=always keeps its rings)"
        )
    return from_recorder(table), f"{len(table.sources)} ranks of the flight recorder"


class _Work(msgspec.Struct, gc=False):
    """The fields of an event that tell when a rank computed."""

    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


_work = msgspec.json.Decoder(list[_Work])


def _busy(
    files: list[TraceFile], offsets: dict[int, int], progress: Progress | None, memory: Memory
) -> dict[int, _Busy]:
    """Finds when each rank computed: its kernels, or torch's operators if there are none."""
    total = sum(f.path.stat().st_size for f in files)
    done = 0
    out = {}
    for file in files:
        shift = file.base_ns - offsets.get(file.rank, 0)
        kernels: list[tuple[float, float]] = []
        operators: list[tuple[float, float]] = []
        with Reader(file.path, facts=False, memory=memory) as reader:
            for piece in reader.pieces_as(_work):
                before = len(kernels) + len(operators)
                for e in piece:
                    if e.cat == "cpu_op":
                        if not e.name.startswith(_NOT_COMPUTE):
                            operators.append((e.ts, e.dur))
                    elif e.cat in _KERNELS and not e.name.startswith(_NOT_COMPUTE):
                        kernels.append((e.ts, e.dur))
                memory.take(_INTERVAL * (len(kernels) + len(operators) - before), file.path)
                if progress is not None:
                    progress(done + reader.position, total)
        done += file.path.stat().st_size
        # Where there are kernels, operators only issue them.
        times = np.asarray(kernels or operators, np.float64).reshape(-1, 2)
        begin = all_nanoseconds(times[:, 0]) + shift
        end = begin + all_nanoseconds(times[:, 1])
        memory.give_back(_INTERVAL * (len(kernels) + len(operators)))
        out[file.rank] = _union(begin, end)
        memory.take(_BUSY * len(out[file.rank].begin), file.path)
    return out


def _union(begin: Column, end: Column) -> _Busy:
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order]) if len(order) else end
    fresh = np.ones(len(begin), np.bool_)
    fresh[1:] = begin[1:] > end[:-1]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(begin)) - 1
    begins, ends = begin[first], end[last] if len(first) else end
    lengths = ends - begins
    return _Busy(begins, ends, np.cumsum(lengths) - lengths)


def _figures(
    found: Operations, joined: Joined, offsets: dict[int, int], busy: dict[int, _Busy], source: str
) -> Report:
    if not len(found):
        raise TraceError(f"{source} hold no operation")
    overlap = np.zeros(len(found), np.int64)
    for rank, one in busy.items():
        # A synchronous operation overlaps with no computation: its thread waits for it.
        mine = np.flatnonzero((found.rank == rank) & found.is_async)
        overlap[mine] = one.within(joined.begin[mine], joined.end[mine])
    first, last = int(joined.begin.min()), int(joined.end.max())
    out = Report(source, last - first, first)
    cost = _cost(found, joined)
    how = np.sign(found.replay).astype(np.int64)
    key = dense(found.group.astype(np.int64), found.op.astype(np.int64), how)
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(key))[:-1]):
        out.operations.append(_operation(found, joined, rows, overlap if busy else None, cost))
    # Operations without times of their own follow the replays in which they ran.
    replays = {o.uid: o.time_ns for o in out.operations if o.op == REPLAY}
    out.operations.sort(
        key=lambda o: (
            -(o.time_ns if o.timed else replays.get(o.uid, 0)),
            o.uid,
            o.op != REPLAY,
            o.op.endswith(_HOW[-1]),
            o.op,
        )
    )
    out.delays = _delays(found, joined, cost)
    by_rank = np.argsort(found.rank, kind="stable")
    ranks = found.ranks.tolist()
    begins = np.searchsorted(found.rank[by_rank], ranks).tolist()
    for rank, begin, end in zip(ranks, begins, [*begins[1:], len(by_rank)], strict=True):
        rows = by_rank[begin:end]
        compared = (found.kind[rows] == OpKind.COLLECTIVE) & (joined.members[rows] > 1) & found.placed[rows]
        several = rows[compared]
        out.ranks.append(
            RankFigures(
                rank=rank,
                operations=int((~found.whole_replay[rows] & (found.replay[rows] >= 0)).sum()),
                communicating_ns=int((joined.end - joined.begin)[rows].sum()),
                waiting_ns=int(joined.waiting[rows].sum()),
                last=float(joined.last[several].mean()) if len(several) else 0.0,
                cost_ns=int(cost[rows].sum()),
                clock_ns=offsets.get(rank, 0),
            )
        )
    return out


def _cost(found: Operations, joined: Joined) -> Column:
    """Returns, in the row of a collective's last rank, the time all others waited for it; 0 elsewhere."""
    cells = found.cell
    lost = np.zeros(int(cells.max()) + 1, np.int64)
    np.add.at(lost, cells, joined.waiting)
    out: Column = np.where(joined.last, lost[cells], 0)
    return out


def _operation(
    found: Operations, joined: Joined, rows: Column, overlap: Column | None, cost: Column
) -> OperationFigures:
    group, op = found.groups[found.group[rows[0]]], found.ops[found.op[rows[0]]]
    collective = found.kind[rows[0]] == OpKind.COLLECTIVE
    ranks = max(len(np.unique(found.rank[rows])), 1)
    lasted = (joined.end - joined.begin)[rows]
    cells, cell = np.unique(found.cell[rows], return_inverse=True)
    cell = cell.reshape(-1)
    n = len(cells)
    first, late = np.full(n, np.iinfo(np.int64).max), np.zeros(n, np.int64)
    np.minimum.at(first, cell, joined.begin[rows])
    np.maximum.at(late, cell, joined.begin[rows])
    transfer, size = np.zeros(n, np.int64), np.zeros(n, np.int64)
    np.maximum.at(transfer, cell, joined.transfer[rows])
    np.maximum.at(size, cell, found.bytes[rows])
    over = np.ones(n, np.bool_)
    over[cell[joined.open[rows]]] = False
    of_size = _BUS.get(op)
    factor = 1.0 if of_size is None else of_size(max(len(group.ranks), 1))
    good = over & (transfer > 0)
    bandwidth = float(size[good].sum() * factor / (transfer[good].sum() / 1e9)) if good.any() else 0.0
    if found.replay[rows[0]]:  # the graph may do other work in that time
        bandwidth = 0.0
    skew = (late - first)[(np.bincount(cell, minlength=n) > 1) & found.placed[rows[0]]]
    lasts = rows[joined.last[rows]]
    worst, share, usual, lost = -1, 0.0, 0, 0
    if collective and len(lasts):
        counts = np.bincount(found.rank[lasts])
        worst = int(np.argmax(counts))
        mine = lasts[found.rank[lasts] == worst]
        share, usual = len(mine) / n, int(np.median(joined.late[mine]))
        lost = int(cost[mine].sum())
    return OperationFigures(
        group=group.name,
        description=group.description,
        members=format_ranks(group.ranks),
        uid=group.uid,
        ranks=len(group.ranks),
        op=op + ("" if found.placed[rows[0]] else _HOW[int(np.sign(found.replay[rows[0]]))]),
        timed=bool(found.placed[rows[0]]),
        count=n if collective else len(rows),
        unfinished=int((~over).sum()),
        bytes=int(found.bytes[rows].sum() // (ranks if collective else 1)),
        time_ns=int(lasted.sum() // ranks),
        waiting_ns=int(joined.waiting[rows].sum() // ranks),
        transfer_ns=int(joined.transfer[rows].sum() // ranks),
        median_ns=int(np.median(lasted)),
        bus_bandwidth=bandwidth,
        skew_ns=int(np.median(skew)) if len(skew) else 0,
        most_skew_ns=int(skew.max()) if len(skew) else 0,
        late_rank=worst,
        late_share=share,
        late_ns=usual,
        late_cost_ns=lost,
        overlap=None if overlap is None else float(overlap[rows].sum() / max(int(lasted.sum()), 1)),
    )


def _delays(found: Operations, joined: Joined, cost: Column) -> list[Delay]:
    """Returns the largest delays: the lateness of last ranks, compared with the typical other rank."""
    lasts = np.flatnonzero(joined.last)
    if not len(lasts):
        return []
    cells = found.cell
    count = int(cells.max()) + 1
    compared = (joined.members > 1) & (found.kind == OpKind.COLLECTIVE) & found.placed
    others = np.flatnonzero(~joined.last & compared)
    base = int(joined.begin.min())
    typical = grouped_median((joined.begin[others] - base).astype(np.float64), cells[others], count)
    late = np.nan_to_num(joined.begin[lasts] - base - typical[cells[lasts]]).astype(np.int64)
    worst = lasts[np.argsort(-late, kind="stable")[:_MOST_DELAYS]]
    by_row = dict(zip(lasts.tolist(), late.tolist(), strict=True))
    return [
        Delay(
            rank=int(found.rank[row]),
            group=found.groups[found.group[row]].name,
            op=found.ops[found.op[row]],
            seq=int(found.seq[row]),
            late_ns=by_row[row],
            cost_ns=int(cost[row]),
            at_ns=int(joined.begin[row]),
        )
        for row in worst.tolist()
    ]


def to_json(found: Report) -> str:
    """Returns the report as JSON, with the fields of the dataclasses above."""
    return json.dumps(asdict(found), indent=1)
