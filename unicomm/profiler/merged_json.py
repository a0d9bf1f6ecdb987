"""A merged trace as Chrome JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from unicomm.flight_recorder.formats.byte_columns import Part, integers, records, thousandths
from unicomm.flight_recorder.table.table import Column

from .chrome import Event, TraceEvent, Writer
from .merged_slices import Labels, RankRows, Slices, as_bytes
from .operation_columns import TraceFile

_FLOW_SPAN = 1 << 32  # each rank's own flows get numbers apart from those of the other ranks


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class JsonSink:
    """Writes a merged trace as Chrome JSON; see `merging.Sink`."""

    def __init__(self, path: Path, base: int, offsets: dict[int, int]) -> None:
        facts = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base,
            "clock_offsets_ns": {str(rank): offset for rank, offset in offsets.items()},
        }
        self._writer = Writer(path, facts)
        self._base = base
        self._pid = 0
        self._threads: dict[tuple[Any, Any], int] = {}
        self._tracks = 0
        self._own: RankRows
        self._label: Labels

    def open_rank(self, file: TraceFile, own: RankRows, names: list[str]) -> None:
        self._pid = file.rank + 1  # viewers take a process 0 for the idle one
        self._threads.clear()
        self._tracks = len(names)
        self._own = own
        self._label = Labels(own, self._described)
        host = f" ({file.host})" if file.host else ""
        events = [self._name("process_name", 0, {"name": f"rank {file.rank}{host}"})]
        events.append(self._name("process_sort_index", 0, {"sort_index": file.rank}))
        for at, name in enumerate(names, 1):
            events.append(self._name("thread_name", at, {"name": name}))
            events.append(self._name("thread_sort_index", at, {"sort_index": at - len(names) - 1}))
        self._writer.write(events)

    def _name(self, what: str, tid: int, args: dict[str, Any]) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}

    def events(
        self, piece: list[TraceEvent], labels: Mapping[int, int], issues: Mapping[int, int], shift_us: float
    ) -> int:
        kept = []
        begun: list[Event] = []
        pid, threads, more = self._pid, self._threads, self._pid * _FLOW_SPAN
        for at, e in enumerate(piece):
            if e.ph == "M" and e.name.startswith("process_"):
                continue  # the rank is the process, whatever processes the trace has (CPU, devices, spans)
            place = (e.pid, e.tid)
            thread = threads.get(place)
            if thread is None:
                thread = threads[place] = self._tracks + 1 + len(threads)
            e.pid, e.tid = pid, thread
            if e.ts is not UNSET and e.ph != "M":
                e.ts = round(e.ts + shift_us, 3)
            if e.id is not UNSET:
                e.id = e.id + more if isinstance(e.id, int) else f"{pid} {e.id}"
            if at in labels:
                row = labels[at]
                e.args = self._labelled(e.args, row)
                if row in issues:
                    begin = {"ph": "s", "cat": "issue", "name": "issue", "id": issues[row]}
                    begun.append(begin | {"pid": pid, "tid": thread, "ts": e.ts})
            kept.append(e)
        self._writer.write(kept)
        self._writer.write(begun)
        return len(kept)

    def _described(self, rows: Column, shared: int) -> list[Part]:
        """The arguments of all events of these rows, which have the same shared ones."""
        own = self._own
        text = _text(own.shared[shared])[1:-1].encode()
        parts: list[Part] = [
            b'"seq_num":',
            integers(own.seq[rows]),
            b"," + text + b',"bytes":',
            integers(own.bytes[rows]),
        ]
        if own.replay[rows[0]]:  # and then of all of them
            parts += [b',"captured_seq":', integers(own.captured_seq[rows])]
            parts += [b',"replay":', integers(own.replay[rows])]
        return parts

    def _labelled(self, args: Any, row: int) -> Raw:
        """The arguments of an event, with those of its row where it was recorded without them."""
        before = b"{}" if args is UNSET else bytes(args)
        if b'"seq_num"' in before:
            return Raw(before)
        if not before.startswith(b"{"):
            raise TypeError("the arguments of an event are no object")
        return Raw(before[:-1] + (b"," if b":" in before else b"") + self._label[row] + b"}")

    def slices(self, made: Slices) -> None:
        if texts := as_bytes(made, self._own, self._records):
            self._writer.write_text(b",\n".join(texts))

    def _records(self, made: Slices, at: Column) -> list[bytes]:
        """The events of some operations that have the same form."""
        own, rows, one = self._own, made.row[at], int(at[0])
        row = int(rows[0])
        name = _text(own.names[int(own.op[row])]).encode()
        place = f'"pid":{self._pid},"tid":{int(made.track[one]) + 1},"ts":'.encode()
        begin, ready = thousandths(made.begin[at] - self._base), thousandths(made.ready[at] - self._base)
        wait, run = thousandths((made.ready - made.begin)[at]), thousandths((made.end - made.ready)[at])
        part = b'{"ph":"X","cat":"unicomm","name":'
        parts: list[Part] = [part + name + b"," + place, begin, b',"dur":']
        parts += [thousandths((made.end - made.begin)[at]), b',"args":{']
        parts += self._described(rows, int(own.shared_of[row]))
        parts += [b',"elements":', integers(own.elements[rows]), b',"waiting_us":', wait]
        parts += [b',"transfer_us":', run, b',"issued_before_us":', thousandths(own.before[rows])]
        parts.append(b',"finished":true' if own.completed[row] else b',"finished":false')
        if own.root[row] >= 0:
            parts += [b',"root":', integers(own.root[rows])]
        if own.peer[row] >= 0:
            parts += [b',"peer":', integers(own.peer[rows])]
        parts.append(b"}}")
        if made.ready[one] > made.begin[one]:
            parts += [b",\n" + part + b'"waiting",' + place, begin, b',"dur":', wait, b"}"]
            if made.end[one] > made.ready[one]:
                parts += [b",\n" + part + b'"transfer",' + place, ready, b',"dur":', run, b"}"]
        if made.flow[one]:
            # Viewers join the events of a flow by category, name and id.
            kind, what = (b"collective", name) if own.collective[row] else (b"message", b'"message"')
            step = f',\n{{"ph":"{"stf"[made.place[one]]}","cat":"'.encode() + kind + b'","name":' + what
            there = thousandths(made.flow_at[at] - self._base)
            parts += [step + b',"id":', integers(made.flow[at]), b"," + place, there, b',"bp":"e"}']
        if made.issue[one]:
            step = b',\n{"ph":"f","cat":"issue","name":"issue","id":'
            parts += [step, integers(made.issue[at]), b"," + place, begin, b',"bp":"e"}']
        return records(len(at), *parts)

    def close(self) -> None:
        self._writer.close()
