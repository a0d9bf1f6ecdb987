"""A merged trace in Perfetto's own format, for ui.perfetto.dev and its query engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from unicomm.flight_recorder.formats.byte_columns import Part, records
from unicomm.flight_recorder.formats.perfetto_packets import (
    BEGIN,
    INSTANT,
    PerfettoFile,
    event,
    events,
    flow,
    flows,
    times,
    timestamps,
)
from unicomm.flight_recorder.table.table import Column

from .chrome import TraceEvent, all_nanoseconds
from .merged_slices import Labels, RankRows, Slices, as_bytes
from .operation_columns import TraceFile

_COLLECTIVE, _ISSUE, _OWN = 1 << 60, 2 << 60, 3 << 60  # kinds of flows, apart from each other
_RANK = 1 << 40
_INTERNAL = ("Record function id", "Ev Idx")  # numbers that torch gives its events, of no use here
_PLAIN = (int, float, bool, str)
_ROUNDING = 2  # nanoseconds by which a slice may end after the slice around it
_MOST_TRACKS = 16  # of a thread
_LAST = 2  # the place of the last rank in a flow
_arguments = msgspec.json.Decoder(dict[str, Any])


class _ThreadTrack:
    """A track of a thread, and the ends of the slices that are open when its latest slice begins."""

    __slots__ = ("_begin", "_ends", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._begin = -1
        self._ends: list[int] = []

    def takes(self, begin: int, end: int) -> bool:
        """Puts a slice onto this track if it nests there; False if not, or if it began before the latest."""
        ends = self._ends
        if begin < self._begin:
            return False
        self._begin = begin
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end > ends[-1] + _ROUNDING:
            return False
        ends.append(min(end, ends[-1]) if ends else end)
        return True


class PerfettoSink:
    """Writes a merged trace as Perfetto's packets; see `merging.Sink`."""

    def __init__(self, path: Path, base: int, offsets: dict[int, int]) -> None:
        self._trace = PerfettoFile(path)
        self._base = base
        self._process = 0
        self._threads: dict[tuple[Any, Any, bool], list[_ThreadTrack]] = {}
        self._titles: dict[tuple[Any, Any], str] = {}
        self._tracks: list[int] = []
        self._rank = 0
        self._own: RankRows
        self._label: Labels

    def open_rank(self, file: TraceFile, own: RankRows, names: list[str]) -> None:
        self._rank = file.rank
        self._own = own
        host = f" ({file.host})" if file.host else ""
        self._process = self._trace.track(f"rank {file.rank}{host}", rank=file.rank)
        self._tracks = [self._trace.track(name, self._process) for name in names]
        self._threads.clear()
        self._titles.clear()
        self._label = Labels(own, self._described)

    def _thread_track(self, e: TraceEvent, begin: int, end: int) -> int:
        """Returns the first track of the event's thread where it nests in another slice or overlaps none.

        Slices of a Perfetto track have to nest, and torch's do not all nest: a step of the profiler begins
        within one Python function and ends in another. Therefore Python functions, which torch writes after
        all other events, have tracks of their own.
        """
        python = e.cat == "python_function"
        found = self._threads.setdefault((e.pid, e.tid, python), [])
        for track in found:
            if track.takes(begin, end):
                return track.number
        if len(found) == _MOST_TRACKS:  # events in no order at all: shown anyway
            return found[-1].number
        name = self._titles.get((e.pid, e.tid)) or f"{e.pid} {e.tid}"
        name += ": Python functions" if python else ""
        name += f" (at the same time, {len(found)})" if found else ""
        track = _ThreadTrack(self._trace.track(name, self._process))
        track.takes(begin, end)
        found.append(track)
        return track.number

    def _content(self, e: TraceEvent) -> bytes:
        """The arguments of an event of the rank's own trace."""
        out = []
        for name, value in _arguments.decode(e.args).items():  # type: ignore[arg-type]
            if name in _INTERNAL:
                continue
            plain = value
            if type(value) not in _PLAIN or (type(value) is int and not -(2**63) <= value < 2**63):
                plain = msgspec.json.encode(value).decode()
            out.append(self._trace.argument(name, plain))
        return b"".join(out)

    def events(
        self, piece: list[TraceEvent], labels: Mapping[int, int], issues: Mapping[int, int], shift_us: float
    ) -> int:
        """Writes slices and instants; flows of the rank's own trace (to kernels) become part of slices."""
        trace = self._trace
        starting: dict[tuple[Any, Any, Any], list[tuple[int, bool]]] = {}
        taken: list[int] = []
        for at, e in enumerate(piece):
            if e.ph in ("X", "i", "I"):
                taken.append(at)
            elif e.ph in ("s", "t", "f"):
                if isinstance(e.id, int):
                    number = _OWN + self._rank * _RANK + e.id % _RANK
                    starting.setdefault((e.pid, e.tid, e.ts), []).append((number, e.ph == "f"))
            elif e.ph == "M" and e.name == "thread_name" and e.args is not UNSET:
                title = str(_arguments.decode(e.args).get("name", ""))
                self._titles.setdefault((e.pid, e.tid), title)
        begins = np.asarray([piece[at].ts for at in taken], np.float64) + shift_us
        durations = np.maximum(
            np.asarray([0 if (e := piece[at]).dur is UNSET else e.dur for at in taken], np.float64), 0
        )
        begin = all_nanoseconds(begins) + self._base
        end = begin + all_nanoseconds(durations)
        packets: list[bytes] = []
        plain = zip(begin.tolist(), end.tolist(), strict=True)
        encoded = zip(timestamps(begin), timestamps(end), strict=True)
        for at, (since, until), (first, last) in zip(taken, plain, encoded, strict=True):
            e = piece[at]
            track = self._thread_track(e, since, until)
            is_slice = e.ph == "X"
            content = trace.begin(BEGIN if is_slice else INSTANT, track, e.name, e.cat)
            if e.args is not UNSET:
                content += self._content(e)
            if at in labels:
                row = labels[at]
                if e.args is UNSET or b'"seq_num"' not in bytes(e.args):
                    content += self._label[row]
                if row in issues:
                    content += flow(_ISSUE + issues[row])
            if is_slice and starting:
                for step in starting.pop((e.pid, e.tid, e.ts), ()):
                    content += flow(*step)
            packets.append(event(first, content))
            if is_slice:
                packets.append(event(last, trace.end(track)))
        trace.write(b"".join(packets))
        return len(taken)

    def _described(self, rows: Column, shared: int) -> list[Part]:
        """The arguments of all events of these rows, which have the same shared ones."""
        own, column = self._own, self._trace.argument_column
        same = b"".join(self._trace.argument(*item) for item in own.shared[shared].items())
        parts = [*column("seq_num", own.seq[rows]), same, *column("bytes", own.bytes[rows])]
        if own.replay[rows[0]]:  # and then of all of them
            parts += column("captured_seq", own.captured_seq[rows])
            parts += column("replay", own.replay[rows])
        return parts

    def slices(self, made: Slices) -> None:
        self._trace.write(b"".join(as_bytes(made, self._own, self._records)))

    def _records(self, made: Slices, at: Column) -> list[bytes]:
        """The packets of some operations that have the same form."""
        trace, own, rows, one = self._trace, self._own, made.row[at], int(at[0])
        row, track = int(rows[0]), self._tracks[made.track[one]]
        begin, ready, end = times(made.begin[at]), times(made.ready[at]), times(made.end[at])
        numbers = {
            "elements": own.elements[rows],
            "waiting_us": (made.ready - made.begin)[at] / 1000,
            "transfer_us": (made.end - made.ready)[at] / 1000,
            "issued_before_us": own.before[rows] / 1000,
        }
        if own.root[row] >= 0:
            numbers["root"] = own.root[rows]
        if own.peer[row] >= 0:
            numbers["peer"] = own.peer[rows]
        content: list[Part] = [trace.begin(BEGIN, track, own.names[int(own.op[row])])]
        content += self._described(rows, int(own.shared_of[row]))
        for name, values in numbers.items():
            content += trace.argument_column(name, values)
        content.append(trace.argument("finished", bool(own.completed[row])))
        step = (
            flows(_COLLECTIVE + made.flow[at], last=bool(made.place[one] == _LAST)) if made.flow[one] else []
        )
        # A message arrives where its transfer begins, not where the receive began to wait.
        arrives = bool(made.flow[one] and made.flow_at[one] > made.ready[one] > made.begin[one])
        content += [] if arrives else step
        if made.issue[one]:
            content += flows(_ISSUE + made.issue[at], last=True)
        parts, over = events(begin, *content), trace.end(track)
        if made.ready[one] > made.begin[one]:
            parts += events(begin, trace.begin(BEGIN, track, "waiting")) + events(ready, over)
            if made.end[one] > made.ready[one]:
                received = times(made.flow_at[at]) if arrives else ready
                parts += events(received, trace.begin(BEGIN, track, "transfer"), *(step if arrives else []))
                parts += events(end, over)
        if own.completed[row]:  # a slice without an end is shown as not finished
            parts += events(end, over)
        return records(len(at), *parts)

    def close(self) -> None:
        self._trace.close()
