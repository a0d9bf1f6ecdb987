"""`unicomm trace show`: the rings of all ranks as tables on a terminal, or as JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.formats.operation_names import item_size
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.ring.reader import (
    CHECKSUMS,
    ENCODED,
    ERRORS,
    P2P,
    RECEIVE,
    STATES,
    Comm,
    InputRemark,
    Ring,
    comm_names,
)
from unicomm.flight_recorder.ring.record_text import arguments, checksums, short_path, short_place
from unicomm.flight_recorder.texts import format_ranks, printable, ranks_text, span

_STYLE = {"completed": "green", "started": "yellow", "created": "cyan", "failed": "red", "absent": "red bold"}
_MAX_COLUMNS = 8  # more ranks share one column, grouped by state
_NEEDED = 4096  # bytes that a record needs at most until it is printed


@dataclass(frozen=True)
class Selection:
    """What to show of the rings.

    Attributes:
        last: the number of operations of each communicator; 0 for all.
        comm: only the communicators of this name (the recorded one, or the one that tells it from others) or
            description; None for all.
        ranks: only these ranks of the job; None for all.
    """

    last: int = 0
    comm: str | None = None
    ranks: tuple[int, ...] | None = None

    def has(self, comm: Comm, name: str) -> bool:
        """Whether a communicator has the chosen name; `name`: see `comm_names`."""
        return self.comm in (None, comm.name, name) or name.startswith(f"{self.comm} (")

    def comms(self, ring: Ring, names: dict[str, str]) -> list[Comm]:
        """Returns the chosen communicators of a ring; `names`: see `comm_names`."""
        return [
            comm
            for comm in ring.comms
            if self.has(comm, names[comm.uid])
            and (self.ranks is None or comm.in_job(comm.rank) in self.ranks)
        ]

    def records(self, ring: Ring, comms: Sequence[Comm]) -> npt.NDArray[Any]:
        """Returns the chosen records of a ring's chosen communicators."""
        rows = [np.flatnonzero(ring.records["comm"] == comm.index)[-self.last :] for comm in comms]
        chosen = np.sort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
        out: npt.NDArray[Any] = ring.records[chosen]
        return out


def needed(rings: Sequence[Ring], what: Selection) -> int:
    """Returns how many bytes it takes at most to print the chosen records."""
    names = comm_names(rings)
    return _NEEDED * sum(len(what.records(ring, what.comms(ring, names))) for ring in rings)


@dataclass
class RecordedOperation:
    """One operation of one communicator, with the records of its ranks."""

    key: tuple[Any, ...]
    records: dict[int, tuple[Ring, Any]] = field(default_factory=dict)  # by rank of the communicator


@dataclass
class RecordedCommunicator:
    """One communicator, with the rings of its ranks and its operations in order of time."""

    comm: Comm
    name: str
    rings: dict[int, tuple[Ring, Comm]] = field(default_factory=dict)  # by rank of the communicator
    operations: list[RecordedOperation] = field(default_factory=list)

    @cached_property
    def first_messages(self) -> dict[tuple[Any, ...], int]:
        """The number of the first message that a rank's ring still has, by (rank, sender, receiver)."""
        out: dict[tuple[Any, ...], int] = {}
        for operation in self.operations:
            if operation.key[0] == "p2p":
                for rank, (ring, record) in operation.records.items():
                    if ring.is_kept(record):
                        continue
                    channel = (rank, *operation.key[1:3])
                    out[channel] = min(out.get(channel, operation.key[-1]), operation.key[-1])
        return out


def gather(rings: Iterable[Ring]) -> list[RecordedCommunicator]:
    """Groups the records of all rings by communicator and operation."""
    comms: dict[str, RecordedCommunicator] = {}
    tables: dict[str, dict[tuple[Any, ...], RecordedOperation]] = defaultdict(dict)
    rings = list(rings)
    names = comm_names(rings)
    for ring in rings:
        for comm in ring.comms:
            whole = comms.setdefault(comm.uid, RecordedCommunicator(comm, names[comm.uid]))
            whole.rings[comm.rank] = (ring, comm)
        for record in ring.records:
            if int(record["comm"]) >= len(ring.comms):
                continue
            comm = ring.comms[int(record["comm"])]
            key = _key(comm, record)
            operation = tables[comm.uid].setdefault(key, RecordedOperation(key))
            operation.records[comm.rank] = (ring, record)
    for uid, whole in comms.items():
        whole.operations = sorted(tables[uid].values(), key=_when)
    return sorted(comms.values(), key=lambda c: c.comm.created_ns)


def _key(comm: Comm, record: Any) -> tuple[Any, ...]:
    flags = int(record["flags"])
    if not flags & P2P:
        return ("collective", int(record["seq"]))
    peer = int(record["peer"])
    pair = (peer, comm.rank) if flags & RECEIVE else (comm.rank, peer)
    return ("p2p", *pair, int(record["seq"]))


def _when(operation: RecordedOperation) -> int:
    return min(ring.real_ns(record["created_ns"]) for ring, record in operation.records.values())


def _state(record: Any) -> str:
    return STATES.get(int(record["state"]), "unknown")


def _cell(ring: Ring, record: Any) -> str:
    """Returns the state and the time that the operation took, or has taken so far."""
    state = _state(record)
    began = int(record["started_ns"]) or int(record["created_ns"])
    ended = int(record["completed_ns"])
    if ended:
        text = f"{'✓' if state == 'completed' else state} {span(ended - began)}"
    elif ring.process_state in ("running", "stopped"):
        text = f"{state} for {span(time.monotonic_ns() - began)}"
    else:
        text = state
    error = ERRORS.get(int(record["error"]), "error")
    return f"{text} ({error})" if error else text


def _joined(comm: Comm, texts: dict[int, str]) -> str:
    """Returns the common text of all ranks of a communicator, else each text with its ranks in the job."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        groups[text].append(comm.in_job(rank))
    if len(groups) <= 1:
        return next(iter(groups), "")
    return "\n".join(f"{format_ranks(sorted(ranks))}: {text}" for text, ranks in groups.items())


def _processes(rings: Sequence[Ring], names: dict[str, str]) -> Table:
    table = Table(title="processes", title_justify="left", show_edge=False)
    for heading in ("rank", "host", "pid", "process", "operations", "communicators", "program"):
        table.add_column(heading, justify="right" if heading in ("rank", "pid", "operations") else "left")
    for ring in rings:
        state = ring.process_state
        style = {"running": "green", "stopped": "yellow", "killed": "red"}.get(state, "")
        rank = f"{ring.rank}/{int(ring.header['world'])}" if ring.rank >= 0 else "-"
        total = f"{ring.total}" + (" (ring wrapped)" if ring.wrapped else "")
        comms = ", ".join(f"{names[c.uid]} ({c.backend}, {c.state})" for c in ring.comms)
        argv = ring.meta.get("argv", [])
        program = " ".join(str(a).rsplit("/", 1)[-1] for a in argv[:2]) if isinstance(argv, list) else ""
        who, what = (rank, ring.host, str(ring.pid)), (total, comms, printable(program))
        table.add_row(*map(Text, who), Text(state, style), *map(Text, what))
    return table


def _operations(whole: RecordedCommunicator, ranks: Sequence[int], last: int, paths: bool) -> Table:
    comm = whole.comm
    who = "" if "ranks " in whole.name else f"{ranks_text(comm.ranks, 30)}, "
    title = f"communicator '{whole.name}' ({who}{comm.backend})"
    title += f", last {last} operations" if last else ""
    table = Table(title=Text(title, "table.title"), title_justify="left", show_edge=False)
    columns = len(ranks) <= _MAX_COLUMNS
    place = short_path if paths else short_place
    table.add_column("#", justify="right")
    shown = [f"rank {comm.in_job(rank)}" for rank in ranks] if columns else ["ranks"]
    for heading in ("operation", "arguments", *shown, "called from"):
        table.add_column(heading, overflow="fold")
    for operation in whole.operations[-last:] if last else whole.operations:
        records = operation.records
        number = f"{operation.key[-1]}"
        if operation.key[0] == "p2p":
            number = f"{comm.in_job(operation.key[1])}→{comm.in_job(operation.key[2])} {number}"
        row: list[RenderableType] = [
            number,
            Text(_joined(comm, {r: records[r][0].op(records[r][1]) for r in sorted(records)})),
            Text(_joined(comm, {r: arguments(*records[r]) for r in sorted(records)})),
        ]
        involved = set(operation.key[1:3]) if operation.key[0] == "p2p" else set(ranks)
        cells = {}
        for rank in ranks:
            if rank in records:
                cells[rank] = (_state(records[rank][1]), _cell(*records[rank]))
            elif rank in involved:
                cells[rank] = _missing(whole, rank, operation)
        if columns:
            row += [Text(cells[r][1], _STYLE.get(cells[r][0], "dim")) if r in cells else "" for r in ranks]
        else:
            row.append(_grouped(comm, cells))
        row.append(Text(_joined(comm, {r: place(*records[r]) for r in sorted(records)})))
        table.add_row(*row)
    return table


def _missing(whole: RecordedCommunicator, rank: int, operation: RecordedOperation) -> tuple[str, str]:
    """Returns (state, reason) for a rank without a record of an operation."""
    if rank not in whole.rings:
        return ("", "no ring")
    ring, comm = whole.rings[rank]
    if operation.key[0] == "collective" and operation.key[-1] <= comm.coll_created:
        return ("", "overwritten")
    if operation.key[0] == "p2p" and ring.wrapped:
        first = whole.first_messages.get((rank, *operation.key[1:3]))
        if first is None:
            return ("", "overwritten or absent")
        if operation.key[-1] < first:
            return ("", "overwritten")
    return ("absent", "absent") if ring.process_state != "elsewhere" else ("absent", "not recorded")


def _grouped(comm: Comm, cells: dict[int, tuple[str, str]]) -> Text:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, (state, text) in cells.items():
        groups[state or text].append(comm.in_job(rank))
    out = Text()
    for i, (state, ranks) in enumerate(groups.items()):
        out.append(("\n" if i else "") + f"{format_ranks(sorted(ranks))} {state}", _STYLE.get(state, "dim"))
    return out


def render(
    rings: Sequence[Ring],
    remarks: Sequence[InputRemark] = (),
    what: Selection = Selection(last=20),
    paths: bool = False,
) -> RenderableType:
    """Returns what `unicomm trace show` prints: the processes, then the last operations of each communicator.

    Args:
        remarks: files that could not be read.
        paths: show the call path of each operation, not only the user's own line.
    """
    names = comm_names(rings)
    parts: list[RenderableType] = [_processes([r for r in rings if _is_chosen(r, what, names)], names)]
    for whole in gather(rings):
        if not what.has(whole.comm, whole.name):
            continue
        shown = sorted(whole.rings)
        if what.ranks is not None:
            shown = [r for r in shown if whole.comm.in_job(r) in what.ranks]
            whole.operations = [o for o in whole.operations if _involved(o, shown)]
        present = range(whole.comm.size) if what.ranks is None and whole.comm.size <= _MAX_COLUMNS else shown
        if whole.operations:
            parts += ["", _operations(whole, list(present), what.last, paths)]
    parts += [Text(f"cannot read {f.path}: {f.message}", "red") for f in remarks]
    return Group(*parts)


def _is_chosen(ring: Ring, what: Selection, names: dict[str, str]) -> bool:
    whole = what.comm is None and (what.ranks is None or ring.rank in what.ranks)
    return whole or bool(what.comms(ring, names))


def _involved(operation: RecordedOperation, ranks: Sequence[int]) -> bool:
    """Whether an operation concerns one of some ranks of its communicator."""
    if operation.key[0] == "collective":
        return bool(ranks)
    return bool({*operation.key[1:3], *operation.records} & {*ranks})


def render_raw(rings: Sequence[Ring], what: Selection = Selection(), paths: bool = False) -> Table:
    """Returns a table with one row per chosen record, with checksums and bytes on the wire if there are any.

    `paths`: with the call path of each record.
    """
    names = comm_names(rings)
    chosen = [(ring, what.records(ring, what.comms(ring, names))) for ring in rings]
    checked = any((records["flags"] & CHECKSUMS).any() for _, records in chosen)
    encoded = any((records["flags"] & ENCODED).any() for _, records in chosen)
    headings = ["rank", "id", "communicator", "#", "op_id", "operation", "arguments", "state", "called from"]
    headings += ["input checksum", "output checksum"] if checked else []
    headings += ["bytes", "sent bytes"] if encoded else []
    table = Table(*headings, show_edge=False)
    for ring, records in chosen:
        for record in records:
            owner = ring.comms[int(record["comm"])]
            cells = (
                *(str(owner.in_job(owner.rank)), str(record["id"]), names[owner.uid]),
                *(str(record["seq"]), str(record["op_id"])),
                ring.op(record),
                arguments(ring, record),
                _cell(ring, record),
                short_path(ring, record) if paths else short_place(ring, record),
                *(checksums(record) if checked else ()),
                *(_sizes(ring, record) if encoded else ()),
            )
            table.add_row(*map(Text, cells))
    return table


def as_data(
    rings: Sequence[Ring], remarks: Sequence[InputRemark] = (), what: Selection = Selection()
) -> dict[str, Any]:
    """Returns the chosen parts of the rings as plain data, for `unicomm trace show --json`."""
    names = comm_names(rings)
    return {
        "processes": [
            {
                "rank": ring.rank,
                "host": ring.host,
                "pid": ring.pid,
                "state": ring.process_state,
                "operations": ring.total,
                "wrapped": ring.wrapped,
                "path": ring.path,
                "communicators": [
                    {"name": names[c.uid], "uid": c.uid, "ranks": c.ranks_text, "backend": c.backend}
                    for c in chosen
                ],
                "trace": to_dict(ring, comms=[c.index for c in chosen], records=what.records(ring, chosen)),
            }
            for ring in rings
            for chosen in [what.comms(ring, names)]
            if _is_chosen(ring, what, names)
        ],
        "findings": [{"path": f.path, "message": f.message} for f in remarks],
    }


def _sizes(ring: Ring, record: Any) -> tuple[str, str]:
    """Returns the bytes of the input in a wire format, and those that the rank has sent; "" without one."""
    if (sent := ring.sent(record)) is None:
        return "", ""
    side = "in" if int(record["n_in"]) else "out"
    width = item_size(ring.dtype(int(record[f"{side}_dtype"])))
    return str(int(record[f"{side}_numel"]) * width), str(sent)
