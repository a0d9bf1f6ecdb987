"""A merged trace in Perfetto's own format, for ui.perfetto.dev and its query engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import EventName, TracePacket, TrackEvent
except ImportError as error:
    raise ImportError(
        f".pftrace needs the package 'perfetto' ({error}): pip install 'unicomm[profile]'"
    ) from None

from .chrome import Event
from .merging import RankRows, Slice
from .operations import TraceFile

_SEQUENCE = 1
_COLLECTIVE, _ISSUE, _OWN = 1 << 60, 2 << 60, 3 << 60  # kinds of flows, apart from each other
_RANK = 1 << 40
_INTERNAL = ("Record function id", "Ev Idx")  # numbers that torch gives its events, of no use here


class PerfettoSink:
    """See `merging.Sink`."""

    def __init__(self, path: Path, base: int) -> None:
        self._file = path.open("wb")
        self._base = base
        self._names: dict[str, int] = {}
        self._next = 1
        self._process = 0
        self._rank = 0
        self._threads: dict[tuple[Any, Any], int] = {}
        self._titles: dict[tuple[Any, Any], str] = {}
        self._tracks: list[int] = []
        self._issues: dict[int, int] = {}
        packet = self._packet()
        packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._write(packet)
        self._ending = self._packet()  # every end but for its time and track
        self._ending.track_event.type = TrackEvent.TYPE_SLICE_END

    def _write(self, packet: Any) -> None:
        # A trace is its packets one after the other, each as field 1. The package's own writer copies each.
        data: bytes = packet.SerializeToString()
        size, frame = len(data), bytearray(b"\n")
        while size > 0x7F:
            frame.append(size & 0x7F | 0x80)
            size >>= 7
        frame.append(size)
        self._file.write(frame + data)

    def _packet(self) -> Any:
        packet: Any = TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _track(self, name: str, order: int | None = None) -> int:
        number, self._next = self._next, self._next + 1
        packet = self._packet()
        packet.track_descriptor.uuid = number
        packet.track_descriptor.name = name
        if order is None:
            packet.track_descriptor.parent_uuid = self._process
        else:
            packet.track_descriptor.process.pid = order + 1  # a pid of 0 is the idle process
            packet.track_descriptor.process.process_name = name
            packet.track_descriptor.sibling_order_rank = order
        self._write(packet)
        return number

    def open_rank(self, file: TraceFile, tracks: list[str]) -> None:
        self._rank = file.rank
        host = f" ({file.host})" if file.host else ""
        self._process = self._track(f"rank {file.rank}{host}", file.rank)
        self._tracks = [self._track(name) for name in tracks]
        self._threads.clear()
        self._titles.clear()

    def _begin(self, at: int, track: int, name: str) -> Any:
        """A packet with the beginning of a slice; texts that come again are written once."""
        packet = self._packet()
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names) + 1
            packet.interned_data.event_names.append(EventName(iid=number, name=name))
        packet.timestamp = at
        event = packet.track_event
        event.type, event.track_uuid, event.name_iid = TrackEvent.TYPE_SLICE_BEGIN, track, number
        return packet

    def _end(self, at: int, track: int) -> None:
        packet = self._ending
        packet.timestamp = at
        packet.track_event.track_uuid = track
        self._write(packet)

    def _annotate(self, event: Any, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if key in _INTERNAL:
                continue
            one = event.debug_annotations.add(name=key)
            if isinstance(value, bool):
                one.bool_value = value
            elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
                one.int_value = value
            elif isinstance(value, float):
                one.double_value = value
            else:
                one.string_value = str(value)

    def _thread(self, e: Event) -> int:
        key = (e.get("pid"), e.get("tid"))
        found = self._threads.get(key)
        if found is None:
            found = self._threads[key] = self._track(self._titles.get(key, f"{key[0]} {key[1]}".strip()))
        return found

    def events(self, piece: list[Event], shift_us: float) -> int:
        """Slices and instants; flows of the rank's own trace (to kernels) are bound to the slices there."""
        flows: dict[tuple[Any, Any, float], list[Event]] = {}
        for e in piece:
            if e.get("ph") in ("s", "t", "f") and "id" in e:
                flows.setdefault((e.get("pid"), e.get("tid"), e["ts"]), []).append(e)
        taken = 0
        for e in piece:
            kind = e.get("ph")
            if kind == "M":
                if e.get("name") == "thread_name":
                    title = str(e.get("args", {}).get("name", ""))
                    self._titles.setdefault((e.get("pid"), e.get("tid")), title)
                continue
            if kind not in ("X", "i", "I"):
                continue
            taken += 1
            track = self._thread(e)
            at = self._base + round((e["ts"] + shift_us) * 1000)
            packet = self._begin(at, track, str(e.get("name", "")))
            event = packet.track_event
            if cat := e.get("cat"):
                event.categories.append(str(cat))
            self._annotate(event, e.get("args", {}))
            if kind != "X":
                event.type = TrackEvent.TYPE_INSTANT
                self._write(packet)
                continue
            for flow in flows.pop((e.get("pid"), e.get("tid"), e["ts"]), ()):
                number = _OWN + self._rank * _RANK + int(flow["id"]) % _RANK
                ids = event.terminating_flow_ids if flow["ph"] == "f" else event.flow_ids
                ids.append(number)
            if issue := self._issues.pop(id(e), 0):
                event.flow_ids.append(_ISSUE + issue)
            self._write(packet)
            self._end(at + max(0, round(e.get("dur", 0) * 1000)), track)
        return taken

    def issued(self, event: Event, shift_us: float, flow: int) -> None:
        self._issues[id(event)] = flow  # it comes in the piece that follows

    def slices(self, own: RankRows, made: list[Slice]) -> None:
        for one in made:
            track = self._tracks[one.track]
            packet = self._begin(one.begin, track, own.names[one.row - own.first])
            event = packet.track_event
            self._annotate(event, own.describe(one))
            if one.flow:
                ids = event.terminating_flow_ids if one.place == "f" else event.flow_ids
                ids.append(_COLLECTIVE + one.flow)
            if one.issue:
                event.terminating_flow_ids.append(_ISSUE + one.issue)
            self._write(packet)
            if one.ready > one.begin:
                for name, begin, end in (("waiting", one.begin, one.ready), ("transfer", one.ready, one.end)):
                    if end > begin:
                        self._write(self._begin(begin, track, name))
                        self._end(end, track)
            if own.completed[one.row - own.first]:  # a slice without an end is shown as not finished
                self._end(one.end, track)

    def close(self) -> None:
        self._file.close()
