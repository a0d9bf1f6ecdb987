"""Merges the traces of all ranks: clocks aligned, one process per rank, a flow through each collective.

Each trace is read twice, a piece at a time: first its table, then its events, which are copied to the output.
Each rank has a track for each of its communicators, above its own threads. An operation on it is divided into
waiting for the last rank, and transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import UNSET

from unicomm.flight_recorder.memory import Memory

from .alignment import align, remarks
from .chrome import TYPED, Progress, Reader, TraceError, TraceEvent, replacing
from .merged_slices import RankRows, Slices, flows, slices, tracks
from .operation_columns import Joined, Operations, TraceFile, join, load_traces
from .records import PREFIX


@dataclass
class Merged:
    """The result of a merge. `remarks` tell what is missing or uncertain in the trace, a sentence each."""

    path: Path
    ranks: list[int]
    events: int = 0
    operations: int = 0
    flows: int = 0
    offsets_ns: dict[int, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class Sink(Protocol):
    """The output of a merge: for each rank `open_rank`, then its events, then its operations as slices."""

    def open_rank(self, file: TraceFile, own: RankRows, names: list[str]) -> None:
        """Begins a rank; `names` are its communicators' tracks."""

    def events(
        self, piece: list[TraceEvent], labels: Mapping[int, int], issues: Mapping[int, int], shift_us: float
    ) -> int:
        """Writes events of the rank's own trace, and returns the number of written ones.

        `labels` maps the position in `piece` of each event that is an operation to its row; `issues` maps a
        row to the number of the flow that begins at its event.
        """

    def slices(self, made: Slices) -> None:
        """Writes some of the rank's operations."""

    def close(self) -> None: ...


def merge(
    traces: Sequence[Path | str],
    output: Path | str,
    progress: Progress | None = None,
    memory: int | None = None,
) -> Merged:
    """Merges one Chrome trace per rank into `output`: .json, .json.gz or .pftrace.

    Calls `progress(done, total)` with numbers of bytes. `memory`: bytes that the operations of all traces may
    need; half of the free memory if None. Raises `TraceError`, or `ImportError` when a package is missing;
    `output` then does not exist.
    """
    target = Path(output)
    if not target.parent.is_dir():
        raise TraceError(f"{target}: the folder {target.parent} does not exist")
    kind = "".join(target.suffixes[-2:])
    if not kind.endswith((".json", ".json.gz", ".pftrace")):
        raise TraceError(f"{target}: the name has to end in .json, .json.gz or .pftrace")
    paths = [Path(t) for t in traces]
    if any(target.exists() and target.samefile(p) for p in paths if p.exists()):
        raise TraceError(f"{target} is one of the traces; choose another name for the output")
    if target.is_dir():
        raise TraceError(f"{target} is a folder; choose another name for the output")
    make = _sink(kind)
    room = Memory(memory, TraceError)
    files, found = load_traces(paths, room)
    clocks = align(found)
    joined = join(found, clocks.offsets)
    # Earlier than everything recorded, because some viewers accept no negative times.
    base = min(f.started_ns - clocks.offsets.get(f.rank, 0) for f in files)
    if len(found):
        base = min(base, int(joined.begin.min()))
    result = Merged(target, [f.rank for f in files], offsets_ns=clocks.offsets)
    result.remarks = remarks(found, clocks, files)
    with replacing(target) as part, closing(make(part, base, clocks.offsets)) as sink:
        _run(files, found, joined, sink, base, result, progress, room)
    return result


def _sink(kind: str) -> Callable[[Path, int, dict[int, int]], Sink]:
    if kind.endswith(".pftrace"):
        from .merged_perfetto import PerfettoSink

        return PerfettoSink
    from .merged_json import JsonSink

    return JsonSink


def _run(
    files: list[TraceFile],
    found: Operations,
    joined: Joined,
    sink: Sink,
    base: int,
    result: Merged,
    progress: Progress | None,
    memory: Memory,
) -> None:
    number, place, result.flows = flows(found, joined)
    total = sum(f.path.stat().st_size for f in files)
    done = 0
    next_issue = 1
    for file in files:
        own = RankRows(found, file.first_row, file.rows)
        names, track_of = tracks(found, joined, own)
        sink.open_rank(file, own, names)
        shift_us = (file.base_ns - result.offsets_ns.get(file.rank, 0) - base) / 1000
        issues: dict[int, int] = {}
        matching = _Matching(own)
        with Reader(file.path, facts=False, memory=memory) as reader:
            for piece in _with_their_flows(reader.pieces_as(TYPED)):
                labels: dict[int, int] = {}
                for at, e in enumerate(piece):
                    if e.name.startswith(PREFIX) and (row := matching.row_of(e)) >= 0:
                        labels[at] = row
                        if own.later[row]:
                            issues[row] = next_issue
                            next_issue += 1
                result.events += sink.events(piece, labels, issues, shift_us)
                if progress is not None:
                    progress(done + reader.position, total)
        done += file.path.stat().st_size
        for made in slices(joined, own, track_of, number, place, issues):
            sink.slices(made)
        result.operations += file.rows


def _with_their_flows(pieces: Iterable[list[TraceEvent]]) -> Iterator[list[TraceEvent]]:
    """Yields the same events, cut so that a slice and the flows that follow it stay in one piece."""
    held: list[TraceEvent] = []
    for piece in pieces:
        together = held + piece
        cut = next((at for at in range(len(together) - 1, 0, -1) if together[at].ph == "X"), len(together))
        yield together[:cut]
        held = together[cut:]
    yield held


class _Matching:
    """Finds the row of an event: the k-th traced row of a thread belongs to the thread's k-th event."""

    def __init__(self, own: RankRows) -> None:
        self._names = own.names_of
        self._queues: dict[int | str, deque[int]] = {}
        self._latest: dict[int | str, float] = {}
        for row, (traced, thread) in enumerate(zip(own.traced.tolist(), own.thread.tolist(), strict=True)):
            if traced:
                self._queues.setdefault(thread, deque()).append(row)

    def row_of(self, e: TraceEvent) -> int:
        """Returns the row, or -1 when the event has none or it cannot be determined."""
        if e.ph != "X" or e.name.endswith(" (run)") or e.tid is UNSET or e.ts is UNSET:
            return -1
        queue = self._queues.get(e.tid)
        if not queue or e.name != self._names[queue[0]]:
            return -1
        if e.ts < self._latest.get(e.tid, e.ts):  # events out of order cannot be counted
            queue.clear()
            return -1
        self._latest[e.tid] = e.ts
        return queue.popleft()
