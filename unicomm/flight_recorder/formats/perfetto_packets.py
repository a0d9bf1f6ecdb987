"""Perfetto's packets as bytes, by the field numbers of its own package.

Its messages are good for the few packets that differ; those of a slice differ in a few numbers only, and come
by the million: those of operations are made many at once (see stencil.py).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
        DebugAnnotation,
        Trace,
        TracePacket,
        TrackEvent,
    )
except ImportError as error:
    raise ImportError(
        f".pftrace needs the package 'perfetto' ({error}): pip install 'unicomm[profile]'"
    ) from None

from unicomm.profiler.operation_columns import Column

from .byte_columns import Cells, Part, eights, varints, width

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_TIME = 9  # bytes of a timestamp: 63 bits
_DOUBLE = struct.Struct("<d")
_FLOW = struct.Struct("<Q")
SEQUENCE = 1  # all packets are of one writer


def varint(n: int) -> bytes:
    """An unsigned number, or a negative one as protobuf has those of 64 bits."""
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
    return varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | kind)


_PACKET = _tag(Trace, "packet", _BYTES)
_EVENT = _tag(TracePacket, "track_event", _BYTES)
_TYPE, _TRACK = _tag(TrackEvent, "type", _VARINT), _tag(TrackEvent, "track_uuid", _VARINT)
_NAME, _CATEGORY = _tag(TrackEvent, "name_iid", _VARINT), _tag(TrackEvent, "category_iids", _VARINT)
_ANNOTATION = _tag(TrackEvent, "debug_annotations", _BYTES)
_FLOWS = _tag(TrackEvent, "flow_ids", _FIXED64), _tag(TrackEvent, "terminating_flow_ids", _FIXED64)
_KEY, _BOOL = _tag(DebugAnnotation, "name_iid", _VARINT), _tag(DebugAnnotation, "bool_value", _VARINT)
_INT, _FLOAT = _tag(DebugAnnotation, "int_value", _VARINT), _tag(DebugAnnotation, "double_value", _FIXED64)
_STRING = _tag(DebugAnnotation, "string_value", _BYTES)
# What every packet of an event begins with, up to its timestamp.
_BEFORE = (
    _tag(TracePacket, "trusted_packet_sequence_id", _VARINT)
    + varint(SEQUENCE)
    + _tag(TracePacket, "sequence_flags", _VARINT)
    + varint(TracePacket.SEQ_NEEDS_INCREMENTAL_STATE)
    + _tag(TracePacket, "timestamp", _VARINT)
)
_FIXED = len(_BEFORE) + _TIME + len(_EVENT)

BEGIN, END, INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT


def times(at: Column) -> Cells:
    """Timestamps, not negative."""
    return varints(np.maximum(at, 0), _TIME)


def framed(packet: bytes) -> bytes:
    """A packet as it stands in a trace."""
    return _PACKET + varint(len(packet)) + packet


def event(time: bytes, content: bytes) -> bytes:
    """A framed packet of an event, its time one row of `times`."""
    size = varint(len(content))
    return b"".join(
        (_PACKET, varint(_FIXED + len(size) + len(content)), _BEFORE, time, _EVENT, size, content)
    )


def events(time: Cells, *content: Part) -> list[Part]:
    """The same of many, as parts of records."""
    size = width(*content)
    more = varint(size)
    return [_PACKET + varint(_FIXED + len(more) + size) + _BEFORE, time, _EVENT + more, *content]


def begins(kind: int, track: int, name: int, category: int = 0) -> bytes:
    """The part of an event's content that many have alike; name and category by their interned numbers."""
    of = _CATEGORY + varint(category) if category else b""
    return of + _TYPE + varint(kind) + _NAME + varint(name) + _TRACK + varint(track)


def ends(track: int) -> bytes:
    return _TYPE + varint(END) + _TRACK + varint(track)


def flow(number: int, last: bool) -> bytes:
    return _FLOWS[last] + _FLOW.pack(number)


def flows(numbers: Column, last: bool) -> list[Part]:
    return [_FLOWS[last], eights(numbers)]


def annotation(key: int, value: Any) -> bytes:
    """An argument, a bool, an integer, a float or a text; its name by the interned number."""
    kind = type(value)
    of = _KEY + varint(key)
    if kind is int:
        one = of + _INT + varint(value)
    elif kind is float:
        one = of + _FLOAT + _DOUBLE.pack(value)
    elif kind is bool:
        one = of + _BOOL + varint(value)
    else:
        text = value.encode()
        one = of + _STRING + varint(len(text)) + text
    return _ANNOTATION + varint(len(one)) + one


def arguments(key: int, values: Column) -> list[Part]:
    """The same of many events, whose arguments are integers or floats."""
    floats = values.dtype.kind == "f"
    of = _KEY + varint(key) + (_FLOAT if floats else _INT)
    cells = eights(values) if floats else varints(values)
    return [_ANNOTATION + varint(len(of) + width(cells)) + of, cells]


def packet() -> Any:
    """A message of the package, for all other packets."""
    out: Any = TracePacket()
    out.trusted_packet_sequence_id = SEQUENCE
    out.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    return out


def first_packet() -> Any:
    out = packet()
    out.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    return out


def interned(field: str, number: int, text: str) -> Any:
    """A packet that gives a text its number; `field` is one of InternedData's."""
    out = packet()
    getattr(out.interned_data, field).add(iid=number, name=text)
    return out
