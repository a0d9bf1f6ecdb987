"""A merged trace in Perfetto's own format, for ui.perfetto.dev and its query engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from unicomm.flight_recorder.formats import perfetto_packets as wire
from unicomm.flight_recorder.formats.byte_columns import Part, alike, records

from .chrome import TraceEvent
from .merged_slices import Labels, RankRows, Slices
from .operation_columns import Column, TraceFile

_COLLECTIVE, _ISSUE, _OWN = 1 << 60, 2 << 60, 3 << 60  # kinds of flows, apart from each other
_RANK = 1 << 40
_INTERNAL = ("Record function id", "Ev Idx")  # numbers that torch gives its events, of no use here
_PLAIN = (int, float, bool, str)
_ROUNDING = 2  # nanoseconds by which a slice may end after the one around it
_MOST_LANES = 16  # of a thread
_LAST = 2  # the place of a flow where it ends
_arguments = msgspec.json.Decoder(dict[str, Any])


class _Lane:
    """A track of a thread, and which of its slices are open at the latest one's begin."""

    __slots__ = ("_begin", "_ends", "track")

    def __init__(self, track: int) -> None:
        self.track = track
        self._begin = -1
        self._ends: list[int] = []

    def takes(self, begin: int, end: int) -> bool:
        """Whether a slice fits here, which then is here; one that began before the latest does not."""
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
    """See `merging.Sink`."""

    def __init__(self, path: Path, base: int, offsets: dict[int, int]) -> None:
        self._file = path.open("wb")
        self._base = base
        self._numbers: dict[tuple[str, str], int] = {}  # of interned texts
        self._keys: dict[str, int] = {}
        self._ends: dict[int, bytes] = {}  # by track
        self._heads: dict[tuple[int, int, str, str], bytes] = {}
        self._next = 1
        self._process = 0
        self._threads: dict[tuple[Any, Any, bool], list[_Lane]] = {}
        self._titles: dict[tuple[Any, Any], str] = {}
        self._tracks: list[int] = []
        self._rank = 0
        self._own: RankRows
        self._label: Labels
        self._write(wire.first_packet())

    def _write(self, packet: Any) -> None:
        self._file.write(wire.framed(packet.SerializeToString()))

    def _number(self, field: str, text: str) -> int:
        """The number of a text, which is written once."""
        number = self._numbers.get((field, text))
        if number is None:
            number = self._numbers[field, text] = len(self._numbers) + 1
            self._write(wire.interned(field, number, text))
        return number

    def _key(self, name: str) -> int:
        number = self._keys[name] = self._number("debug_annotation_names", name)
        return number

    def _annotations(self, values: Mapping[str, Any]) -> bytes:
        out = []
        for name, value in values.items():
            if name in _INTERNAL:
                continue
            plain = value
            if type(value) not in _PLAIN or (type(value) is int and not -(2**63) <= value < 2**63):
                plain = msgspec.json.encode(value).decode()
            out.append(wire.annotation(self._keys.get(name) or self._key(name), plain))
        return b"".join(out)

    def _head(self, kind: int, track: int, name: str, category: str = "") -> bytes:
        found = self._heads.get((kind, track, name, category))
        if found is None:
            of = self._number("event_categories", category) if category else 0
            number = self._number("event_names", name)
            found = self._heads[kind, track, name, category] = wire.begins(kind, track, number, of)
        return found

    def _track(self, name: str, order: int | None = None) -> int:
        number, self._next = self._next, self._next + 1
        packet = wire.packet()
        packet.track_descriptor.uuid = number
        packet.track_descriptor.name = name
        if order is None:
            packet.track_descriptor.parent_uuid = self._process
        else:
            packet.track_descriptor.process.pid = order + 1  # a pid of 0 is the idle process
            packet.track_descriptor.process.process_name = name
            packet.track_descriptor.sibling_order_rank = order
        self._write(packet)
        self._ends[number] = wire.ends(number)
        return number

    def open_rank(self, file: TraceFile, own: RankRows, names: list[str]) -> None:
        self._rank = file.rank
        self._own = own
        host = f" ({file.host})" if file.host else ""
        self._process = self._track(f"rank {file.rank}{host}", file.rank)
        self._tracks = [self._track(name) for name in names]
        self._threads.clear()
        self._titles.clear()
        self._heads.clear()
        self._label = Labels(own, self._described)

    def _lane(self, e: TraceEvent, begin: int, end: int) -> _Lane:
        """The first track of the event's thread on which it lies within another slice or beside all.

        Slices of a Perfetto track have to nest, and torch's do not all: a step of the profiler begins within
        a Python function and ends in another one. So Python functions, which torch writes behind all other
        events, have tracks of their own.
        """
        python = e.cat == "python_function"
        lanes = self._threads.setdefault((e.pid, e.tid, python), [])
        for lane in lanes:
            if lane.takes(begin, end):
                return lane
        if len(lanes) == _MOST_LANES:  # no order at all: it is to be seen, wherever
            return lanes[-1]
        name = self._titles.get((e.pid, e.tid)) or f"{e.pid} {e.tid}"
        name += ": Python functions" if python else ""
        lane = _Lane(self._track(name + (f" (at the same time, {len(lanes)})" if lanes else "")))
        lane.takes(begin, end)
        lanes.append(lane)
        return lane

    def events(
        self, piece: list[TraceEvent], labels: Mapping[int, int], issues: Mapping[int, int], shift_us: float
    ) -> int:
        """Slices and instants; flows of the rank's own trace (to kernels) are bound to the slices there."""
        flows: dict[tuple[Any, Any, Any], list[tuple[int, bool]]] = {}
        taken: list[int] = []
        for at, e in enumerate(piece):
            if e.ph in ("X", "i", "I"):
                taken.append(at)
            elif e.ph in ("s", "t", "f"):
                if isinstance(e.id, int):
                    number = _OWN + self._rank * _RANK + e.id % _RANK
                    flows.setdefault((e.pid, e.tid, e.ts), []).append((number, e.ph == "f"))
            elif e.ph == "M" and e.name == "thread_name" and e.args is not UNSET:
                title = str(_arguments.decode(e.args).get("name", ""))
                self._titles.setdefault((e.pid, e.tid), title)
        begins = np.asarray([piece[at].ts for at in taken], np.float64) + shift_us
        lasts = np.maximum(
            np.asarray([0 if (e := piece[at]).dur is UNSET else e.dur for at in taken], np.float64), 0
        )
        begin = np.rint(begins * 1000).astype(np.int64) + self._base
        end = begin + np.rint(lasts * 1000).astype(np.int64)
        packets: list[bytes] = []
        plain = zip(begin.tolist(), end.tolist(), strict=True)
        encoded = zip(records(len(begin), wire.times(begin)), records(len(end), wire.times(end)), strict=True)
        for at, (since, until), (first, last) in zip(taken, plain, encoded, strict=True):
            e = piece[at]
            track = self._lane(e, since, until).track
            sliced = e.ph == "X"
            content = self._head(wire.BEGIN if sliced else wire.INSTANT, track, e.name, e.cat)
            if e.args is not UNSET:
                content += self._annotations(_arguments.decode(e.args))
            if at in labels:
                row = labels[at]
                if e.args is UNSET or b'"seq_num"' not in bytes(e.args):
                    content += self._label[row]
                if row in issues:
                    content += wire.flow(_ISSUE + issues[row], last=False)
            if sliced and flows:
                for step in flows.pop((e.pid, e.tid, e.ts), ()):
                    content += wire.flow(*step)
            packets.append(wire.event(first, content))
            if sliced:
                packets.append(wire.event(last, self._ends[track]))
        self._file.write(b"".join(packets))
        return len(taken)

    def _described(self, rows: Column, shared: int) -> list[Part]:
        """The arguments of all events of these rows, which have the same shared ones."""
        own = self._own
        seq = wire.arguments(self._key("seq_num"), own.seq[rows])
        parts = [
            *seq,
            self._annotations(own.shared[shared]),
            *wire.arguments(self._key("bytes"), own.bytes[rows]),
        ]
        if own.replay[rows[0]]:  # and then of all of them
            parts += wire.arguments(self._key("captured_seq"), own.captured_seq[rows])
            parts += wire.arguments(self._key("replay"), own.replay[rows])
        return parts

    def slices(self, made: Slices) -> None:
        own, row = self._own, made.row
        waits, runs = made.ready > made.begin, made.end > made.ready
        out: list[bytes] = [b""] * len(row)
        kinds = (own.op[row], own.shared_of[row], own.completed[row], own.root[row] >= 0, own.peer[row] >= 0)
        for at in alike(made.track, waits, runs, made.flow > 0, made.place, made.issue > 0, *kinds):
            for i, packets in zip(at.tolist(), self._records(made, at), strict=True):
                out[i] = packets
        self._file.write(b"".join(out))

    def _records(self, made: Slices, at: Column) -> list[bytes]:
        """The packets of some operations that have the same."""
        own, rows, one = self._own, made.row[at], int(at[0])
        row, track = int(rows[0]), self._tracks[made.track[one]]
        begin, ready, end = wire.times(made.begin[at]), wire.times(made.ready[at]), wire.times(made.end[at])
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
        content: list[Part] = [self._head(wire.BEGIN, track, own.names[int(own.op[row])])]
        content += self._described(rows, int(own.shared_of[row]))
        for name, values in numbers.items():
            content += wire.arguments(self._key(name), values)
        content.append(self._annotations({"finished": bool(own.completed[row])}))
        if made.flow[one]:
            content += wire.flows(_COLLECTIVE + made.flow[at], last=bool(made.place[one] == _LAST))
        if made.issue[one]:
            content += wire.flows(_ISSUE + made.issue[at], last=True)
        parts, over = wire.events(begin, *content), wire.ends(track)
        if made.ready[one] > made.begin[one]:
            parts += wire.events(begin, self._head(wire.BEGIN, track, "waiting")) + wire.events(ready, over)
            if made.end[one] > made.ready[one]:
                parts += wire.events(ready, self._head(wire.BEGIN, track, "transfer")) + wire.events(
                    end, over
                )
        if own.completed[row]:  # a slice without an end is shown as not finished
            parts += wire.events(end, over)
        return records(len(at), *parts)

    def close(self) -> None:
        self._file.close()
