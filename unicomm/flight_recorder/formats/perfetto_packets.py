"""Traces in Perfetto's binary format, written packet by packet.

The report of the recorder and the merged trace of the profiler are written through this module. The few
packets that differ from each other (tracks, names) are messages of the package `perfetto`. Slices come by the
million and differ in a few numbers, so their packets are put together as bytes, with the field numbers that
the package declares.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from unicomm.flight_recorder.extras import explain

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        DebugAnnotation,
        Trace,
        TracePacket,
        TrackEvent,
    )
except ImportError as error:
    raise (explain(error, "a Perfetto trace", "trace") or error) from None

from .byte_columns import Cells, Column, Part, fixed64, records, varints, width

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # protobuf's wire types
_TIME = 9  # bytes of a timestamp: 63 bits
_DOUBLE = struct.Struct("<d")
_FLOW = struct.Struct("<Q")
_SEQUENCE = 1  # all packets come from one writer


def _varint(n: int) -> bytes:
    """Protobuf's encoding of an integer of 64 bits."""
    if 0 <= n < len(_SHORT):
        return _SHORT[n]
    return _encoded(n & (1 << 64) - 1)


def _encoded(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


_SHORT = [_encoded(n) for n in range(1 << 14)]  # sizes of packets, most arguments


def _tag(message: Any, field: str, kind: int) -> bytes:
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


_PACKET = _tag(Trace, "packet", _BYTES)
_EVENT = _tag(TracePacket, "track_event", _BYTES)
_TYPE, _TRACK = _tag(TrackEvent, "type", _VARINT), _tag(TrackEvent, "track_uuid", _VARINT)
_NAME, _CATEGORY = _tag(TrackEvent, "name_iid", _VARINT), _tag(TrackEvent, "category_iids", _VARINT)
_ARGUMENT = _tag(TrackEvent, "debug_annotations", _BYTES)
_FLOWS = _tag(TrackEvent, "flow_ids", _FIXED64), _tag(TrackEvent, "terminating_flow_ids", _FIXED64)
_KEY, _BOOL = _tag(DebugAnnotation, "name_iid", _VARINT), _tag(DebugAnnotation, "bool_value", _VARINT)
_INT, _FLOAT = _tag(DebugAnnotation, "int_value", _VARINT), _tag(DebugAnnotation, "double_value", _FIXED64)
_STRING = _tag(DebugAnnotation, "string_value", _BYTES)
# The begin of every packet with an event, up to the value of its timestamp.
_BEFORE = (
    _tag(TracePacket, "trusted_packet_sequence_id", _VARINT)
    + _varint(_SEQUENCE)
    + _tag(TracePacket, "sequence_flags", _VARINT)
    + _varint(TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
    + _tag(TracePacket, "timestamp", _VARINT)
)
_FIXED = len(_BEFORE) + _TIME + len(_EVENT)
_END = _TYPE + _varint(TrackEvent.TYPE_SLICE_END)

BEGIN, INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_INSTANT


def times(at: Column) -> Cells:
    """Timestamps in nanoseconds; negative ones become 0."""
    return varints(np.maximum(at, 0), _TIME)


def timestamps(at: Column) -> list[bytes]:
    """The same as single values, for `event`."""
    return records(len(at), times(at))


def event(time: bytes, content: bytes) -> bytes:
    """The packet of one event; `time` comes from `timestamps`."""
    size = _varint(len(content))
    return b"".join(
        (_PACKET, _varint(_FIXED + len(size) + len(content)), _BEFORE, time, _EVENT, size, content)
    )


def events(time: Cells, *content: Part) -> list[Part]:
    """The packets of many events of one length, as parts of records; `time` comes from `times`."""
    size = width(*content)
    more = _varint(size)
    return [_PACKET + _varint(_FIXED + len(more) + size) + _BEFORE, time, _EVENT + more, *content]


def flow(number: int, last: bool = False) -> bytes:
    """A part of an event's content: the flow `number` passes here, or ends here with `last`."""
    return _FLOWS[last] + _FLOW.pack(number)


def flows(numbers: Column, last: bool) -> list[Part]:
    """The same for many events."""
    return [_FLOWS[last], fixed64(numbers)]


class PerfettoFile:
    """A trace file under construction: its tracks and its interned names.

    Names of events and arguments are written once and get numbers. `begin`, `end`, `argument` and `flow` make
    the content of events, `event` and `events` make packets of it, `write` appends these.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file. Raises `OSError`."""
        self._file = path.open("wb")
        self._numbers: dict[tuple[str, str], int] = {}
        self._keys: dict[str, bytes] = {}
        self._heads: dict[tuple[int, str, str], bytes] = {}
        self._tracks = [b""]  # the reference to each track, by its number
        first = self.packet()
        first.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self.write_packet(first)

    def packet(self) -> Any:
        """A new packet as a message of the package, for `write_packet`."""
        out: Any = TracePacket()
        out.trusted_packet_sequence_id = _SEQUENCE
        out.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        return out

    def write_packet(self, packet: Any) -> None:
        data = packet.SerializeToString()
        self._file.write(_PACKET + _varint(len(data)) + data)

    def write(self, packets: bytes) -> None:
        self._file.write(packets)

    def close(self) -> None:
        self._file.close()

    def track(self, name: str, parent: int = 0, rank: int | None = None) -> int:
        """Adds a track and returns its number; with `rank`, the track of that rank's process."""
        number = len(self._tracks)
        packet = self.packet()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name = number, name
        if parent:
            descriptor.parent_uuid = parent
        if rank is not None:
            descriptor.process.pid = rank + 1  # a pid of 0 is the idle process
            descriptor.process.process_name = name
            descriptor.sibling_order_rank = rank
        self.write_packet(packet)
        self._tracks.append(_TRACK + _varint(number))
        return number

    def begin(self, kind: int, track: int, name: str, category: str = "") -> bytes:
        """The content of an event of `kind` (BEGIN of a slice, or INSTANT) up to its arguments."""
        head = self._heads.get((kind, name, category))
        if head is None:
            of = _CATEGORY + _varint(self._number("event_categories", category)) if category else b""
            head = of + _TYPE + _varint(kind) + _NAME + _varint(self._number("event_names", name))
            self._heads[kind, name, category] = head
        return head + self._tracks[track]

    def end(self, track: int) -> bytes:
        """The content of the event that ends the innermost open slice of a track."""
        return _END + self._tracks[track]

    def argument(self, name: str, value: Any) -> bytes:
        """A part of an event's content: an argument that is a bool, an integer, a float or a text."""
        key = self._keys.get(name) or self._key(name)
        kind = type(value)
        if kind is int:
            one = key + _INT + _varint(value)
        elif kind is float:
            one = key + _FLOAT + _DOUBLE.pack(value)
        elif kind is bool:
            one = key + _BOOL + _varint(value)
        else:
            text = value.encode()
            one = key + _STRING + _varint(len(text)) + text
        return _ARGUMENT + _varint(len(one)) + one

    def argument_column(self, name: str, values: Column) -> list[Part]:
        """The same for many events, whose values are integers or floats."""
        floats = values.dtype.kind == "f"
        of = (self._keys.get(name) or self._key(name)) + (_FLOAT if floats else _INT)
        cells = fixed64(values) if floats else varints(values)
        return [_ARGUMENT + _varint(len(of) + width(cells)) + of, cells]

    def _key(self, name: str) -> bytes:
        key = self._keys[name] = _KEY + _varint(self._number("debug_annotation_names", name))
        return key

    def _number(self, field: str, text: str) -> int:
        """The number of a text, which is written on its first use; `field` is one of InternedData's."""
        number = self._numbers.get((field, text))
        if number is None:
            number = self._numbers[field, text] = len(self._numbers) + 1
            packet = self.packet()
            getattr(packet.interned_data, field).add(iid=number, name=text)
            self.write_packet(packet)
        return number
