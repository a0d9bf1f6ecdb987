"""Reads merged traces as the tests need them, and checks what every viewer relies on."""

import gzip
import importlib
import json
from dataclasses import dataclass


def load(path):
    """Reads a trace, and checks what every viewer relies on: the slices of a thread nest."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text)
    by_thread = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    for slices in by_thread.values():
        slices.sort(key=lambda s: (s[0], -s[1]))
        open_ = []
        for begin, end, name in slices:
            while open_ and open_[-1] <= begin + 0.002:
                open_.pop()
            assert not open_ or end <= open_[-1] + 0.002, f"{name} overlaps"
            open_.append(end)
    return trace


def named(trace):
    return [e for e in trace["traceEvents"] if e["name"] == "process_name"]


def processes(trace):
    """pid -> name."""
    return {e["pid"]: e["args"]["name"] for e in named(trace)}


@dataclass
class Decoded:
    """A Perfetto trace: flows as (process, slice, whether it ends there), the processes, and the slices.

    A slice is (process, track, name, begin in ns, end in ns, arguments).
    """

    flows: dict
    processes: set
    slices: list


def decode(path):
    """Reads a Perfetto trace with the package's messages; slices of a track must nest and end."""
    protos = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.track_descriptor.uuid}
    names = {n.iid: n.name for p in trace.packet for n in p.interned_data.event_names}
    keys = {n.iid: n.name for p in trace.packet for n in p.interned_data.debug_annotation_names}
    flows, depth, slices, open_ = {}, {}, [], {}
    for packet in sorted(trace.packet, key=lambda p: p.timestamp):
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        process = tracks[tracks[event.track_uuid].parent_uuid].process.process_name
        step = {event.TYPE_SLICE_BEGIN: 1, event.TYPE_SLICE_END: -1}.get(event.type, 0)
        depth[event.track_uuid] = depth.get(event.track_uuid, 0) + step
        assert depth[event.track_uuid] >= 0
        stack = open_.setdefault(event.track_uuid, [])
        if step > 0:
            values = {keys[a.name_iid]: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}
            where = (process, tracks[event.track_uuid].name, names[event.name_iid])
            stack.append((*where, packet.timestamp, values))
        elif step < 0:
            process_, track, name, begin, values = stack.pop()
            slices.append((process_, track, name, begin, packet.timestamp, values))
        for flow in (*event.flow_ids, *event.terminating_flow_ids):
            step = (process, names[event.name_iid], len(event.terminating_flow_ids))
            flows.setdefault(flow, []).append(step)
    assert set(depth.values()) == {0}
    return Decoded(flows, {t.process.process_name for t in tracks.values()}, slices)


def operations(trace, name="unicomm::all_reduce"):
    return [
        e for e in trace["traceEvents"] if e["ph"] == "X" and e.get("cat") == "unicomm" and e["name"] == name
    ]
