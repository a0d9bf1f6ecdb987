"""The traces of all ranks as one: clocks aligned, a process a rank, a flow through each collective.

Each trace is read twice, a piece at a time: its table first, then its events, which go on to the output.
Above the ranks' own threads each has a track for each communicator, on which an operation has its time of
waiting for the last rank apart from the transfer.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .chrome import Event, Progress, Reader, TraceError, Writer
from .operations import Column, Joined, Operations, TraceFile, clock_offsets, join, lanes, load_traces
from .records import PREFIX

_FLOW_SPAN = 1 << 32  # a rank's own flows get numbers apart from the other ranks'


@dataclass
class Merged:
    """What was put together."""

    path: Path
    ranks: list[int]
    events: int = 0
    operations: int = 0
    flows: int = 0
    offsets_ns: dict[int, int] = field(default_factory=dict)
    dropped: int = 0


@dataclass(slots=True)
class Slice:
    """An operation on a track of its communicator. Times in nanoseconds since 1970, aligned."""

    row: int
    track: int
    begin: int
    ready: int
    end: int
    flow: int  # of its collective, 0 for none
    place: str  # in that flow: s, t or f for its first, a middle and its last rank
    issue: int  # number of the flow from where it was issued, 0 for none


class Sink(Protocol):
    """Where a merged trace goes."""

    def open_rank(self, file: TraceFile, tracks: list[str]) -> None:
        """A rank begins, with these tracks of communicators."""

    def events(self, piece: list[Event], shift_us: float) -> int:
        """Events of the rank's own trace; how many were taken."""

    def issued(self, event: Event, shift_us: float, flow: int) -> None:
        """A flow begins in an event that issued an asynchronous operation."""

    def slices(self, own: RankRows, made: list[Slice]) -> None:
        """The rank's operations."""

    def close(self) -> None: ...


def merge(traces: Sequence[Path | str], output: Path | str, progress: Progress | None = None) -> Merged:
    """Merges one Chrome trace a rank into `output`: .json, .json.gz or .pftrace.

    `progress(done, total)` is told bytes. Nothing is left under the name of `output` when it fails. Raises
    `TraceError`, and `ImportError` with a cure where a package is missing.
    """
    target = Path(output)
    if not target.parent.is_dir():
        raise TraceError(f"{target}: the folder {target.parent} is not there")
    kind = "".join(target.suffixes[-2:])
    if not kind.endswith((".json", ".json.gz", ".pftrace")):
        raise TraceError(f"{target}: the name has to end in .json, .json.gz or .pftrace")
    paths = [Path(t) for t in traces]
    if any(target.exists() and target.samefile(p) for p in paths if p.exists()):
        raise TraceError(f"{target} is one of the traces; choose another name for the output")
    files, found = load_traces(paths)
    offsets = clock_offsets(found)
    joined = join(found, offsets)
    base = min((f.stopped_ns for f in files), default=0)
    if len(found):
        base = min(base, int(joined.begin.min()))
    part = target.with_name(target.name + f".{os.getpid()}.part" + (".gz" if kind.endswith(".gz") else ""))
    result = Merged(target, [f.rank for f in files], offsets_ns=offsets)
    try:
        sink = _sink(part, kind, base, offsets)
        try:
            _run(files, found, joined, sink, base, result, progress)
        finally:
            sink.close()
        part.replace(target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error}") from None
    finally:
        part.unlink(missing_ok=True)
    return result


def _sink(part: Path, kind: str, base: int, offsets: dict[int, int]) -> Sink:
    if kind.endswith(".pftrace"):
        from .pftrace import PerfettoSink

        return PerfettoSink(part, base)
    facts = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "clock_offsets_ns": {str(rank): offset for rank, offset in offsets.items()},
    }
    return JsonSink(part, base, facts)


def _run(
    files: list[TraceFile],
    found: Operations,
    joined: Joined,
    sink: Sink,
    base: int,
    result: Merged,
    progress: Progress | None,
) -> None:
    places, result.flows = _flows(found, joined)
    total = sum(f.path.stat().st_size for f in files)
    done = 0
    next_issue = 1
    for file in files:
        rows = np.arange(file.first_row, file.first_row + file.rows)
        names, track_of = _tracks(found, joined, rows)
        sink.open_rank(file, names)
        shift_us = (file.base_ns - result.offsets_ns.get(file.rank, 0) - base) / 1000
        issues: dict[int, int] = {}
        waiting, own = _queues(found, rows), RankRows(found, rows)
        with Reader(file.path) as reader:
            for piece in reader.pieces():
                for e in piece:
                    name = e.get("name")
                    if type(name) is not str or not name.startswith(PREFIX):
                        continue
                    row = _row_of(e, waiting, own)
                    if row >= 0:
                        e["args"] = e.get("args", {}) | own.arguments[row - own.first]
                        if own.is_async[row - own.first]:
                            issues[row] = next_issue
                            sink.issued(e, shift_us, next_issue)
                            next_issue += 1
                result.events += sink.events(piece, shift_us)
                if progress is not None:
                    progress(done + reader.position, total)
        done += file.path.stat().st_size
        sink.slices(own, list(_slices(joined, rows, track_of, places, issues)))
        result.operations += len(rows)
        result.dropped += file.dropped


def _queues(found: Operations, rows: Column) -> dict[int, deque[int]]:
    """The rows that torch has events of, by thread and in order."""
    queues: dict[int, deque[int]] = {}
    traced = rows[found.traced[rows]]
    for row, thread in zip(traced.tolist(), found.thread[traced].tolist(), strict=True):
        queues.setdefault(thread, deque()).append(row)
    return queues


def _row_of(e: Event, queues: dict[int, deque[int]], own: RankRows) -> int:
    if e.get("ph") != "X" or e["name"].endswith(" (run)"):
        return -1
    queue = queues.get(e["tid"]) if isinstance(e.get("tid"), int) else None
    if not queue or e["name"] != own.names[queue[0] - own.first]:
        return -1
    return queue.popleft()


class RankRows:
    """The rows of one rank as plain lists, which are much quicker to go through than columns."""

    def __init__(self, found: Operations, rows: Column) -> None:
        self.first = int(rows[0]) if len(rows) else 0

        def plain(column: Column) -> list[Any]:
            values: list[Any] = column[rows].tolist()
            return values

        self.names = [PREFIX + found.ops[i] for i in plain(found.op)]
        self.is_async, self.completed = plain(found.is_async), plain(found.completed_ns)
        self.before = plain(found.arrived_ns - found.issued_ns)
        self.elements, self.root, self.peer = plain(found.elements), plain(found.root), plain(found.peer)
        # What an event has with `record_shapes=True`, for those without.
        self.arguments: list[dict[str, Any]] = [
            {
                "seq_num": seq,
                "comm": found.groups[group].name,
                "comm_uid": found.groups[group].uid,
                "bytes": size,
                "dtype": found.dtypes[dtype],
                "is_async": later,
            }
            for seq, group, size, dtype, later in zip(
                *(
                    plain(found.seq),
                    plain(found.group),
                    plain(found.bytes),
                    plain(found.dtype),
                    self.is_async,
                ),
                strict=True,
            )
        ]

    def describe(self, one: Slice) -> dict[str, Any]:
        """The arguments of an operation's slice."""
        at = one.row - self.first
        out = self.arguments[at] | {
            "elements": self.elements[at],
            "waiting_us": (one.ready - one.begin) / 1000,
            "transfer_us": (one.end - one.ready) / 1000,
            "issued_before_us": self.before[at] / 1000,
            "finished": self.completed[at] != 0,
        }
        if self.root[at] >= 0:
            out["root"] = self.root[at]
        if self.peer[at] >= 0:
            out["peer"] = self.peer[at]
        return out


def _flows(found: Operations, joined: Joined) -> tuple[tuple[Column, Column], int]:
    """(number of the flow, place in it) of each row, and how many flows there are."""
    n = len(found)
    number, place = np.zeros(n, np.int64), np.zeros(n, np.uint8)
    if not n:
        return (number, place), 0
    rows = np.flatnonzero(joined.members > 1)
    order = rows[np.lexsort((found.rank[rows], joined.begin[rows], found.cell[rows]))]
    cells = found.cell[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = cells[1:] != cells[:-1]
    last = np.ones(len(order), np.bool_)
    last[:-1] = first[1:]
    number[order] = np.cumsum(first)
    place[order] = np.where(first, 0, np.where(last, 2, 1))
    return (number, place), int(first.sum())


def _tracks(found: Operations, joined: Joined, rows: Column) -> tuple[list[str], dict[int, int]]:
    """Names of the rank's tracks, and the track of each row; operations that overlap get several."""
    names: list[str] = []
    track_of: dict[int, int] = {}
    # A group's operations of several ranks in one trace (threads) overlap too.
    for group in np.unique(found.group[rows]).tolist():
        mine = rows[found.group[rows] == group]
        mine = mine[np.argsort(joined.begin[mine], kind="stable")]
        lane_of = lanes(joined.begin[mine], joined.end[mine])
        for row, lane in zip(mine.tolist(), lane_of, strict=True):
            track_of[row] = len(names) + lane
        name = f"unicomm: {found.groups[group].description or found.groups[group].name}"
        more = max(lane_of, default=-1)
        names += [name, *(f"{name} (at the same time, {i + 1})" for i in range(1, more + 1))]
    return names, track_of


def _slices(
    joined: Joined,
    rows: Column,
    track_of: dict[int, int],
    places: tuple[Column, Column],
    issues: dict[int, int],
) -> Iterator[Slice]:
    number, place = places[0][rows].tolist(), places[1][rows].tolist()
    times = (joined.begin[rows].tolist(), joined.ready[rows].tolist(), joined.end[rows].tolist())
    for row, flow, at, begin, ready, end in zip(rows.tolist(), number, place, *times, strict=True):
        where = "stf"[at] if flow else ""
        yield Slice(row, track_of[row], begin, ready, end, flow, where, issues.get(row, 0))


class JsonSink:
    """A Chrome trace."""

    def __init__(self, path: Path, base: int, facts: dict[str, Any]) -> None:
        self._writer = Writer(path, facts)
        self._base = base
        self._pid = 0
        self._threads: dict[tuple[Any, Any], int] = {}
        self._tracks = 0
        self._more: list[Event] = []

    def open_rank(self, file: TraceFile, tracks: list[str]) -> None:
        self._pid = file.rank + 1  # viewers take a process 0 for the idle one
        self._threads.clear()
        self._tracks = len(tracks)
        host = f" ({file.host})" if file.host else ""
        events = [self._name("process_name", 0, {"name": f"rank {file.rank}{host}"})]
        events.append(self._name("process_sort_index", 0, {"sort_index": file.rank}))
        for at, name in enumerate(tracks, 1):
            events.append(self._name("thread_name", at, {"name": name}))
            events.append(self._name("thread_sort_index", at, {"sort_index": at - len(tracks) - 1}))
        self._writer.write(events)

    def _name(self, what: str, tid: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}

    def _thread(self, e: Event) -> int:
        key = (e.get("pid"), e.get("tid"))
        found = self._threads.get(key)
        if found is None:
            found = self._threads[key] = self._tracks + 1 + len(self._threads)
        return found

    def events(self, piece: list[Event], shift_us: float) -> int:
        kept = []
        pid, threads, flows = self._pid, self._threads, self._pid * _FLOW_SPAN
        for e in piece:
            if e.get("ph") == "M" and str(e.get("name", "")).startswith("process_"):
                continue  # the rank is the process, whatever the trace has: CPU, devices, spans
            thread = threads.get((e.get("pid"), e.get("tid")))
            e["tid"] = self._thread(e) if thread is None else thread
            e["pid"] = pid
            ts = e.get("ts")
            if ts is not None:
                e["ts"] = round(ts + shift_us, 3)
            if "id" in e and isinstance(e["id"], int):
                e["id"] += flows
            kept.append(e)
        self._writer.write(kept)
        self._writer.write(self._more)
        self._more.clear()
        return len(kept)

    def issued(self, event: Event, shift_us: float, flow: int) -> None:
        begin = {"ph": "s", "cat": "issue", "name": "issue", "id": flow, "pid": self._pid}
        begin |= {"tid": self._thread(event), "ts": round(event["ts"] + shift_us, 3)}
        self._more.append(begin)

    def _us(self, ns: int) -> float:
        return (ns - self._base) / 1000

    def slices(self, own: RankRows, made: list[Slice]) -> None:
        out: list[Event] = []
        pid, first, names = self._pid, own.first, own.names

        def part(name: str, tid: int, ts: float, dur: float) -> Event:
            place = {"pid": pid, "tid": tid, "ts": ts, "dur": dur}
            return {"ph": "X", "cat": "unicomm", "name": name, **place}

        def step(kind: str, cat: str, name: str, number: int, tid: int, ts: float) -> Event:
            place = {"pid": pid, "tid": tid, "ts": ts, "bp": "e"}
            return {"ph": kind, "cat": cat, "name": name, "id": number, **place}

        for one in made:
            tid, begin, name = one.track + 1, self._us(one.begin), names[one.row - first]
            whole = part(name, tid, begin, (one.end - one.begin) / 1000)
            whole["args"] = own.describe(one)
            out.append(whole)
            if one.ready > one.begin:
                out.append(part("waiting", tid, begin, (one.ready - one.begin) / 1000))
                if one.end > one.ready:
                    out.append(part("transfer", tid, self._us(one.ready), (one.end - one.ready) / 1000))
            if one.flow:
                out.append(step(one.place, "collective", name, one.flow, tid, begin))
            if one.issue:
                out.append(step("f", "issue", "issue", one.issue, tid, begin))
            if len(out) > 10_000:
                self._writer.write(out)
                out.clear()
        self._writer.write(out)

    def close(self) -> None:
        self._writer.close()
