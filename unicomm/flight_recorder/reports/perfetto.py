"""The operations of all ranks as a trace for ui.perfetto.dev.

Each rank is a process and each of its groups a track. Operations of one group that overlap, as queued ones
do, get tracks beside each other. A flow leads from rank to rank through each collective, and from each send
to its receive.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from unicomm.flight_recorder.analysis.matching import messages
from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.formats.operation_names import OpKind
from unicomm.flight_recorder.formats.perfetto_packets import (
    BEGIN,
    INSTANT,
    PerfettoFile,
    event,
    flow,
    timestamps,
)
from unicomm.flight_recorder.ring.call_path import user_frame
from unicomm.flight_recorder.ring.reader import ERRORS, STATES
from unicomm.flight_recorder.table.table import Column, Table
from unicomm.flight_recorder.table.tracks import side_by_side
from unicomm.flight_recorder.texts import ranks_text

from . import timeline

MOST_SLICES = 300_000  # the viewer keeps all of them in memory
_NEVER = 1 << 62


def write(report: Report, table: Table, path: Path | str) -> Path:
    """Writes the trace and returns its path. Raises `OSError`.

    When there are more than `MOST_SLICES` operations, it holds the newest of each rank.
    """
    target = Path(path)
    per_rank = max(100, MOST_SLICES // max(len(table.source_of), 1))
    line = timeline.build(report, table, table.source_of, per_rank)
    with closing(PerfettoFile(target)) as trace:
        _Writer(trace, report, table, line).write()
    return target


def flow_ids(table: Table, rows: Column) -> Column:
    """One number for the rows that belong together: a collective, or a send and its receive; 0 for others."""
    kind = table.calls.kind[table.call[rows]]
    collective = (kind == OpKind.COLLECTIVE) & (table.group[rows] >= 0)
    key = np.stack([table.group[rows].astype(np.int64), table.seq[rows]], axis=1)[collective]
    _, ids = np.unique(key, axis=0, return_inverse=True)
    found = messages(table)
    paired = found.partner >= 0
    pair = np.zeros(len(table), np.int64)
    pair[found.rows[paired]] = 1 + np.minimum(found.rows, found.partner)[paired]
    out: Column = pair[rows]
    out[collective] = len(table) + 1 + ids.reshape(-1)
    return out


class _Writer:
    def __init__(self, trace: PerfettoFile, report: Report, table: Table, line: timeline.Timeline) -> None:
        self._trace = trace
        self._report, self._table, self._line = report, table, line
        self._flows = flow_ids(table, line.rows)

    def write(self) -> None:
        self._verdict()
        table, rows = self._table, self._line.rows
        rank, group = table.rank[rows], table.group[rows]
        culprits = set(self._report.main.culprits)
        for source in sorted(table.sources, key=lambda s: s.rank):
            mark = " (culprit)" if source.rank in culprits else ""
            process = self._trace.track(f"rank {source.rank}{mark}", rank=source.rank)
            begin, end = np.searchsorted(rank, [source.rank, source.rank + 1])
            inside = np.arange(begin, end)
            for index in np.unique(group[inside]).tolist():
                self._group(process, index, inside[group[inside] == index])

    def _verdict(self) -> None:
        main = self._report.main
        packet = self._trace.packet()
        packet.timestamp = max(timeline.since(self._report, self._table), self._line.first_ns)
        instant = packet.track_event
        instant.type, instant.name = INSTANT, main.sentence
        instant.track_uuid = self._trace.track(f"verdict: {main.verdict.value}")
        for name, text in (
            ("culprits", ranks_text(main.culprits) if main.culprits else ""),
            ("victims", ranks_text(main.victims) if main.victims else ""),
            ("evidence", "; ".join(main.evidence)),
        ):
            if text:
                instant.debug_annotations.add(name=name, string_value=text)
        self._trace.write_packet(packet)

    def _group(self, process: int, group: int, inside: Column) -> None:
        """Writes the operations of one group of a rank."""
        table, line, trace = self._table, self._line, self._trace
        inside = inside[np.argsort(line.begin_ns[inside], kind="stable")]
        begin, end = line.begin_ns[inside], line.end_ns[inside]
        track_of = side_by_side(begin, np.where(line.open[inside], _NEVER, end)).tolist()
        name = table.groups[group].name if group >= 0 else "no group"
        tracks = [
            trace.track(name if i == 0 else f"{name} (at the same time, {i + 1})", process)
            for i in range(max(track_of, default=-1) + 1)
        ]
        for at, number, first, last in zip(
            inside.tolist(), track_of, timestamps(begin), timestamps(end), strict=True
        ):
            trace.write(event(first, self._slice(tracks[number], name, at)))
            if not line.open[at]:  # the viewer shows a slice without an end as not finished
                trace.write(event(last, trace.end(tracks[number])))

    def _slice(self, track: int, group: str, at: int) -> bytes:
        """The content of the event that begins an operation's slice."""
        table, line, trace = self._table, self._line, self._trace
        row = int(line.rows[at])
        call = int(table.call[row])
        error = ERRORS[int(table.error[row])]
        frame = user_frame(table.stack(row))
        values: dict[str, int | str] = {
            "group": group,
            "seq": int(table.seq[row]),
            "arguments": table.describe_call(call),
            "state": STATES[int(table.state[row])] + (f" ({error})" if error else ""),
            "elements": int(table.calls.in_numel[call]) or int(table.calls.out_numel[call]),
            "waited for the last rank (us)": int(line.ready_ns[at] - line.begin_ns[at]) // 1000,
            "called from": f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} {frame.function}" if frame else "",
            "peer": int(table.peer[row]) if table.peer[row] >= 0 else "",
            **{f"{side} checksum": text for side, text in table.checksums.texts(row).items()},
        }
        content = trace.begin(BEGIN, track, table.ops[int(table.calls.op[call])])
        if number := int(self._flows[at]):
            content += flow(number)
        return content + b"".join(trace.argument(*item) for item in values.items() if item[1] != "")
