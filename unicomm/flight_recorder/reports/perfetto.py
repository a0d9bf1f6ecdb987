"""The operations as a trace for ui.perfetto.dev: a process for each rank, a track for each of its groups.

Operations of one group that overlap (queued ones do) get tracks beside each other. A flow leads from rank to
rank through each collective and from each send to its receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        DebugAnnotationName,
        EventName,
        TracePacket,
        TrackEvent,
    )
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
except ImportError as error:
    raise ImportError(
        f"--perfetto needs the package 'perfetto' ({error}): pip install 'unicomm[trace]'"
    ) from None

from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.ring.reader import ERRORS, State
from unicomm.flight_recorder.table.table import Column, Table, user_frame
from unicomm.flight_recorder.texts import ranks_text

from . import timeline

MOST_SLICES = 300_000  # the viewer keeps all in memory; each takes about 10 us to write
_SEQUENCE = 1
_VERDICT_TRACK = 1
_STATES = {
    State.CREATED: "created",
    State.STARTED: "started",
    State.COMPLETED: "completed",
    State.FAILED: "failed",
}
_ARGUMENTS = (
    "group",
    "seq",
    "arguments",
    "state",
    "elements",
    "waited for the last rank (us)",
    "called from",
    "peer",
)


def write(report: Report, table: Table, path: Path | str) -> Path:
    """Writes the trace; of very many operations the newest of each rank. Raises `OSError`."""
    target = Path(path)
    per_rank = max(100, MOST_SLICES // max(len(table.source_of), 1))
    line = timeline.build(report, table, table.source_of, per_rank)
    with target.open("wb") as file:
        _Writer(file, report, table, line).write()
    return target


def lanes(begin: Column, end: Column, still_open: Column) -> list[int]:
    """For operations in the order of their beginning, the first lane in which each overlaps no other."""
    free: list[int] = []  # when each lane is free
    out = []
    for b, e, o in zip(begin.tolist(), end.tolist(), still_open.tolist(), strict=True):
        lane = next((i for i, at in enumerate(free) if at <= b), len(free))
        if lane == len(free):
            free.append(0)
        free[lane] = 1 << 62 if o else e
        out.append(lane)
    return out


def flow_ids(table: Table, rows: Column) -> Column:
    """One number for the rows that belong together: a collective, or a send and its receive; 0 for others."""
    kind = table.calls.kind[table.call[rows]]
    rank, peer = table.rank[rows].astype(np.int64), table.peer[rows].astype(np.int64)
    source = np.where(kind == OpKind.RECV, peer, rank)
    target = np.where(kind == OpKind.RECV, rank, peer)
    collective = kind == OpKind.COLLECTIVE
    source[collective] = target[collective] = -1
    key = np.stack([table.group[rows].astype(np.int64), source, target, table.seq[rows]], axis=1)
    _, ids = np.unique(key, axis=0, return_inverse=True)
    good = (collective | (kind == OpKind.SEND) | (kind == OpKind.RECV)) & (table.group[rows] >= 0)
    out: Column = np.where(good, ids.reshape(-1) + 1, 0)
    return out


class _Writer:
    def __init__(self, file: IO[bytes], report: Report, table: Table, line: timeline.Timeline) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._report, self._table, self._line = report, table, line
        self._next_track = _VERDICT_TRACK + 1
        self._flows = flow_ids(table, line.rows)

    def _packet(self, needs_names: bool = True) -> Any:
        packet: TracePacket = self._builder.create_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = (
            TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            if needs_names
            else TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        )
        return packet

    def _track(self, name: str, parent: int = 0, rank: int | None = None) -> int:
        number, self._next_track = self._next_track, self._next_track + 1
        packet = self._packet()
        descriptor = packet.track_descriptor
        descriptor.uuid = number
        descriptor.name = name
        if parent:
            descriptor.parent_uuid = parent
        if rank is not None:
            descriptor.process.pid = rank + 1  # a pid of 0 is the idle process
            descriptor.process.process_name = name
            descriptor.sibling_order_rank = rank
        self._builder.write_packet(packet)
        return number

    def write(self) -> None:
        self._names()
        self._verdict()
        table, rows = self._table, self._line.rows
        rank, group = table.rank[rows], table.group[rows]
        culprits = set(self._report.main.culprits)
        for source in sorted(table.sources, key=lambda s: s.rank):
            mark = " (culprit)" if source.rank in culprits else ""
            process = self._track(f"rank {source.rank}{mark}", rank=source.rank)
            begin, end = np.searchsorted(rank, [source.rank, source.rank + 1])
            inside = np.arange(begin, end)
            for index in np.unique(group[inside]).tolist():
                self._group(process, index, inside[group[inside] == index])

    def _names(self) -> None:
        """Texts that come again and again are written once."""
        packet = self._packet(needs_names=False)
        interned = packet.interned_data
        interned.event_names.extend(EventName(iid=i + 1, name=op) for i, op in enumerate(self._table.ops))
        interned.debug_annotation_names.extend(
            DebugAnnotationName(iid=i + 1, name=name) for i, name in enumerate(_ARGUMENTS)
        )
        self._builder.write_packet(packet)

    def _verdict(self) -> None:
        main = self._report.main
        packet = self._packet()
        packet.track_descriptor.uuid = _VERDICT_TRACK
        packet.track_descriptor.name = f"verdict: {main.verdict.value}"
        self._builder.write_packet(packet)
        packet = self._packet()
        packet.timestamp = max(main.since_ns, self._line.first_ns) or self._line.first_ns
        event = packet.track_event
        event.type, event.track_uuid, event.name = TrackEvent.TYPE_INSTANT, _VERDICT_TRACK, main.sentence
        for name, text in (
            ("culprits", ranks_text(main.culprits) if main.culprits else ""),
            ("victims", ranks_text(main.victims) if main.victims else ""),
            ("evidence", "; ".join(main.evidence)),
        ):
            if text:
                event.debug_annotations.add(name=name, string_value=text)
        self._builder.write_packet(packet)

    def _group(self, process: int, group: int, inside: Column) -> None:
        table, line = self._table, self._line
        inside = inside[np.argsort(line.begin_ns[inside], kind="stable")]
        lane_of = lanes(line.begin_ns[inside], line.end_ns[inside], line.open[inside])
        name = table.groups[group].name if group >= 0 else "no group"
        tracks = [
            self._track(name if i == 0 else f"{name} (at the same time, {i + 1})", process)
            for i in range(max(lane_of, default=-1) + 1)
        ]
        for at, lane in zip(inside.tolist(), lane_of, strict=True):
            self._slice(tracks[lane], name, at)

    def _slice(self, track: int, group: str, at: int) -> None:
        table, line = self._table, self._line
        row = int(line.rows[at])
        call = int(table.call[row])
        packet = self._packet()
        packet.timestamp = int(line.begin_ns[at])
        event = packet.track_event
        event.type, event.track_uuid = TrackEvent.TYPE_SLICE_BEGIN, track
        event.name_iid = int(table.calls.op[call]) + 1
        if flow := int(self._flows[at]):
            event.flow_ids.append(flow)
        for number, value in enumerate(self._arguments(row, call, group, at), 1):
            if isinstance(value, int):
                event.debug_annotations.add(name_iid=number, int_value=value)
            elif value:
                event.debug_annotations.add(name_iid=number, string_value=value)
        self._builder.write_packet(packet)
        if line.open[at]:
            return  # the viewer shows a slice without an end as not finished
        packet = self._packet()
        packet.timestamp = int(line.end_ns[at])
        packet.track_event.type, packet.track_event.track_uuid = TrackEvent.TYPE_SLICE_END, track
        self._builder.write_packet(packet)

    def _arguments(self, row: int, call: int, group: str, at: int) -> Iterator[int | str]:
        """In the order of `_ARGUMENTS`; "" leaves one out."""
        table, line = self._table, self._line
        yield group
        yield int(table.seq[row])
        yield table.describe_call(call)
        error = ERRORS[int(table.error[row])]
        yield _STATES.get(State(int(table.state[row])), "") + (f" ({error})" if error else "")
        yield int(table.calls.in_numel[call]) or int(table.calls.out_numel[call])
        yield int(line.ready_ns[at] - line.begin_ns[at]) // 1000
        frame = user_frame(table.stack(row))
        yield f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}" if frame else ""
        yield int(table.peer[row]) if table.peer[row] >= 0 else ""
