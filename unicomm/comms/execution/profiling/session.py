"""One recording of torch.profiler: the rows and events of its operations."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import torch

from unicomm.c10d.compat import RecordFunction, known_groups, profiler_enabled
from unicomm.comms.execution.member import Member
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.dtypes import NAMES, code_of
from unicomm.extensions import torch_extensions
from unicomm.flight_recorder.texts import format_ranks

VERSION = 3  # 2 brought captured_seq and replay, 3 wire and wire_bytes
KEY = "unicomm"  # of the table in a trace
REPLAY = "replay"  # the name of a row that stands for a graph's replay as a whole
CAPTURED = -1  # in the column `replay`: a graph took it down
CREATED, STARTED, COMPLETED, FAILED = 1, 2, 3, 4  # as in the recorder
MOST_ROWS = 1_000_000  # of one recording; later operations are counted only

# Everything a JSON string can hold as it is: kineto turns backslashes of metadata into slashes.
_PLAIN = " !#$&'()*+,-./:;<=>?@[]^_`{|}~"


def plain(text: str) -> str:
    """Printable ASCII without quotes, backslashes and percent signs, which are written as %XX of UTF-8."""
    return quote(text, safe=_PLAIN)


class Described(NamedTuple):
    """What a row and an event say of an operation, without its number. `kind` is torch's element type."""

    op: str
    n_in: int = 0
    n_out: int = 0
    dtype: str = ""
    kind: torch.dtype = torch.uint8
    bytes: int = 0
    root: int = -1
    peer: int = -1
    in_splits: Sequence[int] = ()
    out_splits: Sequence[int] = ()
    wire: str = ""  # the format in which the elements travel, if they are encoded

    @classmethod
    def of(cls, call: Call) -> Described:
        """Of a collective, message or one-sided operation. Keeps none of its tensors."""
        n_in, n_out = sum(t.numel() for t in call.inputs), sum(t.numel() for t in call.outputs)
        some = next(iter(call.inputs or call.outputs), None)
        if some is None:
            return cls(call.name, n_in, n_out, root=call.root, peer=call.peer)
        size = max(n_in, n_out) * some.element_size()
        splits = call.in_splits or (), call.out_splits or ()
        name = NAMES[code_of(some.dtype)]
        wire = "" if call.wire is None else call.wire.format.text
        return cls(call.name, n_in, n_out, name, some.dtype, size, call.root, call.peer, *splits, wire)


@dataclass(slots=True, kw_only=True)
class Row:
    """A row of the table. Its fields are the table's columns, in this order."""

    op: str
    seq_num: int
    group: int
    thread: int
    traced: int = 0
    issued_ns: int
    started_ns: int = 0
    completed_ns: int = 0
    state: int = CREATED
    is_async: int
    in_elements: int
    out_elements: int
    dtype: str
    root: int
    peer: int
    bytes: int
    in_splits: str
    out_splits: str
    batch: int
    captured_seq: int
    replay: int
    wire: str = ""
    wire_bytes: int = 0


COLUMNS = tuple(field.name for field in fields(Row))


class Observed(Protocol):
    """The engine of a communicator, as rows and events describe it."""

    member: Member
    rank: int


class Span:
    """One operation of a recording, from its issue to its end."""

    __slots__ = ("_event", "_open", "name", "row")

    def __init__(self, name: str, row: Row, event: Any) -> None:
        """`event`: of torch's profiler; None where torch does not record the thread."""
        self.name = name
        self.row = row
        self._event = event
        self._open: Any = None

    def enter(self) -> None:
        """Opens the event, in the thread that issues the operation."""
        if self._event is not None:
            self._open = self._event
            self.row.traced = 1
            self._open.__enter__()

    def leave(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def begin(self, later: bool) -> None:
        """The operation begins to run: in the call that issued it or, `later`, in the worker."""
        self.start()
        if later:  # the trace shows this event when torch records all threads
            self._open = RecordFunction(f"{self.name} (run)")
            self._open.__enter__()
        else:
            self.enter()

    def end(self, error: BaseException | None, wire_bytes: int = 0) -> None:
        """The operation that `begin` was called for has ended, having sent `wire_bytes`."""
        self.row.wire_bytes = wire_bytes
        self.leave()
        self.finish(error)

    def start(self) -> None:
        self.row.started_ns, self.row.state = time.time_ns(), STARTED

    def captured(self) -> None:
        """A graph has captured the operation, which has not run."""
        self.row.captured_seq, self.row.replay = self.row.seq_num, CAPTURED
        self.start()
        self.finish(None)

    def ran(self, started_ns: int, completed_ns: int) -> None:
        """Sets the times at which the device ran it, in nanoseconds since the epoch."""
        row = self.row
        row.started_ns, row.completed_ns, row.state = started_ns, completed_ns, COMPLETED

    def finish(self, error: BaseException | None, peer: int = -1) -> None:
        row = self.row
        row.completed_ns = time.time_ns()
        row.state = COMPLETED if error is None else FAILED
        if peer >= 0:
            row.peer = peer


class _Both:
    """Our event with torch's own record of the same operation in it."""

    __slots__ = ("_own", "_torch")

    def __init__(self, own: Any, record: Any) -> None:
        self._own = own
        self._torch = record

    def __enter__(self) -> None:
        self._own.__enter__()
        self._torch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._torch.__exit__()
        self._own.__exit__(None, None, None)


class Session:
    """What happens during one recording of the profiler."""

    def __init__(self) -> None:
        self.started_ns = time.time_ns()
        self.stopped_ns = 0
        self.rows: list[Row] = []
        self.dropped = 0
        self.groups: list[dict[str, Any]] = []
        self._facts: weakref.WeakKeyDictionary[Observed, tuple[int, dict[str, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._batch = 0
        self._adding = threading.Lock()
        self._bridge = torch_extensions.load()
        self.table: dict[str, Any] = {}

    def _of(self, engine: Observed) -> tuple[int, dict[str, Any]]:
        """The communicator's number in this recording, and the arguments that all its events have."""
        found = self._facts.get(engine)
        if found is not None:
            return found
        with self._adding:
            found = self._facts.get(engine)
            if found is not None:  # another thread was quicker
                return found
            member = engine.member
            name, desc = _torch_names(engine)
            group = {
                "uid": plain(member.uid),
                "name": plain(member.name),
                "group_name": plain(name),
                "description": plain(desc),
                "backend": plain(member.backend.name),
                "ranks": format_ranks(member.labels),
                "rank": member.rank,
                "size": member.size,
            }
            facts = {
                "comm": group["name"],
                "comm_uid": group["uid"],
                "group_name": group["group_name"],
                "group_description": group["description"],
                "group_ranks": group["ranks"],
                "group_size": member.size,
                "rank": member.rank,
                "backend": group["backend"],
            }
            facts = {key: value for key, value in facts.items() if value != ""}  # kineto drops empty ones
            found = self._facts[engine] = (len(self.groups), facts)
            self.groups.append(group)
            return found

    def add(
        self,
        engine: Observed,
        what: Described,
        seq: int,
        later: bool,
        batch: int = 0,
        captured_seq: int = 0,
        replay: int = 0,
        inputs: Sequence[torch.Tensor] = (),
    ) -> Span:
        """Adds a row. The calling thread is to enter and leave the span's event.

        `inputs`: the tensors whose shapes the event has with `record_shapes=True`.
        """
        index, facts = self._of(engine)
        into, out = ",".join(map(str, what.in_splits)), ",".join(map(str, what.out_splits))
        row = Row(
            op=what.op,
            seq_num=seq,
            group=index,
            thread=threading.get_native_id(),
            issued_ns=time.time_ns(),
            is_async=int(later),
            in_elements=what.n_in,
            out_elements=what.n_out,
            dtype=what.dtype,
            root=what.root,
            peer=what.peer,
            bytes=what.bytes,
            in_splits=into,
            out_splits=out,
            batch=batch,
            captured_seq=captured_seq,
            replay=replay,
            wire=what.wire,
        )
        if len(self.rows) < MOST_ROWS:
            self.rows.append(row)
        else:
            self.dropped += 1
        name = f"unicomm::{what.op}"
        if not profiler_enabled():
            return Span(name, row, None)
        arguments: dict[str, Any] = {
            "seq_num": seq,
            "in_elements": what.n_in,
            "out_elements": what.n_out,
            "bytes": what.bytes,
            "is_async": later,
        }
        optional: dict[str, Any] = {"dtype": what.dtype, "root": what.root, "peer": what.peer}
        optional |= {"in_splits": into, "out_splits": out, "wire": what.wire}
        arguments |= {name: value for name, value in optional.items() if value not in ("", -1)}
        if replay:
            arguments |= {"captured_seq": captured_seq, "replay": replay}
        event: Any = RecordFunction(name, tuple(inputs), facts | arguments)
        if self._bridge is not None and what.op != REPLAY:
            event = _Both(event, self._record(engine, facts, what, seq, later))
        return Span(name, row, event)

    def _record(
        self,
        engine: Observed,
        facts: dict[str, Any],
        what: Described,
        seq: int,
        later: bool,
    ) -> Any:
        """torch's own record; it can name ranks at equal distances only."""
        ranks = list(engine.member.labels)
        steps = {b - a for a, b in itertools.pairwise(ranks)}
        stride = steps.pop() if len(steps) == 1 else int(len(ranks) == 1)
        assert self._bridge is not None
        return self._bridge.Record(
            *(seq, what.peer >= 0),
            *(facts.get("group_name") or facts["comm"], facts.get("group_description", "")),
            *(engine.rank, what.op, what.n_in, what.n_out, what.kind),
            *(list(what.in_splits), list(what.out_splits), ranks[0], stride, len(ranks), later),
        )

    def next_batch(self) -> int:
        self._batch += 1
        return self._batch

    def close(self, there: Iterable[Observed]) -> None:
        """Freezes the table: what ends later counts as not finished.

        `there` are the communicators that are in use. A process that issued no operation tells them, so that
        its trace can be put beside those of other ranks.
        """
        self.stopped_ns = time.time_ns()
        if not self.groups:
            for engine in there:
                self._of(engine)
        self.table = {
            "version": VERSION,
            "host": plain(socket.gethostname()),
            "pid": os.getpid(),
            "clock": _boot(),
            "started_ns": self.started_ns,
            "stopped_ns": self.stopped_ns,
            "dropped": self.dropped,
            "groups": self.groups,
            "columns": list(COLUMNS),
            "rows": [[getattr(row, name) for name in COLUMNS] for row in self.rows],
        }
        self.rows = []


def _boot() -> str:
    """Names this start of this machine: processes with the same name, in containers too, have one clock."""
    try:
        return plain(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    except OSError:
        return ""


def _torch_names(engine: Observed) -> tuple[str, str]:
    """Name and description of the process group that a communicator belongs to, as far as torch knows one."""
    if not torch.distributed.is_available():
        return "", ""
    for group in known_groups():
        comms = getattr(group, "_comms", None)
        if isinstance(comms, dict) and any(c._engine is engine for c in comms.values()):
            return str(group.group_name), str(group.group_desc)
    return "", ""
