"""`unicomm trace show`: the rings of all ranks as tables on a terminal, or as JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.ring.reader import ERRORS, P2P, RECEIVE, STATES, Comm, InputRemark, Ring
from unicomm.flight_recorder.ring.record_text import arguments, short_path, short_place
from unicomm.flight_recorder.texts import format_ranks, span

_STYLE = {"completed": "green", "started": "yellow", "created": "cyan", "failed": "red", "absent": "red bold"}
_MAX_COLUMNS = 8  # more ranks share one column, grouped by state


@dataclass
class RecordedOperation:
    """One operation of one communicator, with the records of its ranks."""

    key: tuple[Any, ...]
    records: dict[int, tuple[Ring, Any]] = field(default_factory=dict)  # by rank of the communicator


@dataclass
class RecordedCommunicator:
    """One communicator, with the rings of its ranks and its operations in order of time."""

    comm: Comm
    rings: dict[int, tuple[Ring, Comm]] = field(default_factory=dict)  # by rank of the communicator
    operations: list[RecordedOperation] = field(default_factory=list)


def gather(rings: Iterable[Ring]) -> list[RecordedCommunicator]:
    """Groups the records of all rings by communicator and operation."""
    comms: dict[str, RecordedCommunicator] = {}
    tables: dict[str, dict[tuple[Any, ...], RecordedOperation]] = defaultdict(dict)
    for ring in rings:
        for comm in ring.comms:
            whole = comms.setdefault(comm.uid, RecordedCommunicator(comm))
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


def _joined(texts: dict[int, str]) -> str:
    """Returns the common text of all ranks, else each text with its ranks."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, text in texts.items():
        groups[text].append(rank)
    if len(groups) <= 1:
        return next(iter(groups), "")
    return "\n".join(f"{format_ranks(sorted(ranks))}: {text}" for text, ranks in groups.items())


def _processes(rings: Sequence[Ring]) -> Table:
    table = Table(title="processes", title_justify="left", show_edge=False)
    for heading in ("rank", "host", "pid", "process", "operations", "communicators", "program"):
        table.add_column(heading, justify="right" if heading in ("rank", "pid", "operations") else "left")
    for ring in rings:
        state = ring.process_state
        style = {"running": "green", "stopped": "yellow", "killed": "red"}.get(state, "")
        rank = f"{ring.rank}/{int(ring.header['world'])}" if ring.rank >= 0 else "-"
        total = f"{ring.total}" + (" (ring wrapped)" if ring.wrapped else "")
        comms = ", ".join(f"{c.name} ({c.backend}, {c.state})" for c in ring.comms)
        argv = ring.meta.get("argv", [])
        program = " ".join(str(a).rsplit("/", 1)[-1] for a in argv[:2]) if isinstance(argv, list) else ""
        table.add_row(rank, ring.host, str(ring.pid), Text(state, style), total, comms, program)
    return table


def _operations(whole: RecordedCommunicator, ranks: Sequence[int], last: int, paths: bool) -> Table:
    comm = whole.comm
    title = f"communicator '{comm.name}' ({comm.backend}, {comm.size} ranks), last {last} operations"
    table = Table(title=title, title_justify="left", show_edge=False)
    columns = len(ranks) <= _MAX_COLUMNS
    place = short_path if paths else short_place
    table.add_column("#", justify="right")
    shown = [f"rank {rank}" for rank in ranks] if columns else ["ranks"]
    for heading in ("operation", "arguments", *shown, "called from"):
        table.add_column(heading, overflow="fold")
    for operation in whole.operations[-last:] if last else whole.operations:
        records = operation.records
        number = f"{operation.key[-1]}"
        if operation.key[0] == "p2p":
            number = f"{operation.key[1]}→{operation.key[2]} {number}"
        row: list[RenderableType] = [
            number,
            _joined({r: records[r][0].op(records[r][1]) for r in sorted(records)}),
            _joined({r: arguments(*records[r]) for r in sorted(records)}),
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
            row.append(_grouped(cells))
        row.append(_joined({r: place(*records[r]) for r in sorted(records)}))
        table.add_row(*row)
    return table


def _missing(whole: RecordedCommunicator, rank: int, operation: RecordedOperation) -> tuple[str, str]:
    """Returns (state, reason) for a rank without a record of an operation."""
    if rank not in whole.rings:
        return ("", "no ring")
    ring, comm = whole.rings[rank]
    if operation.key[0] == "collective" and operation.key[-1] <= comm.coll_created:
        return ("", "overwritten")
    return ("absent", "absent") if ring.process_state != "elsewhere" else ("absent", "not recorded")


def _grouped(cells: dict[int, tuple[str, str]]) -> Text:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, (state, text) in cells.items():
        groups[state or text].append(rank)
    out = Text()
    for i, (state, ranks) in enumerate(groups.items()):
        out.append(("\n" if i else "") + f"{format_ranks(sorted(ranks))} {state}", _STYLE.get(state, "dim"))
    return out


def render(
    rings: Sequence[Ring],
    remarks: Sequence[InputRemark] = (),
    last: int = 20,
    comm: str | None = None,
    ranks: Sequence[int] | None = None,
    paths: bool = False,
) -> RenderableType:
    """Returns what `unicomm trace show` prints: the processes, then the last operations of each communicator.

    Args:
        remarks: files that could not be read.
        last: the number of operations of each communicator; 0 for all.
        comm: show only the communicator of this name.
        ranks: show only these ranks; None for all.
        paths: show the call path of each operation, not only the user's own line.
    """
    parts: list[RenderableType] = [_processes(rings)]
    for whole in gather(rings):
        if comm is not None and whole.comm.name != comm:
            continue
        shown = sorted(whole.rings) if ranks is None else [r for r in ranks if r in whole.rings]
        present = range(whole.comm.size) if ranks is None and whole.comm.size <= _MAX_COLUMNS else shown
        if whole.operations:
            parts += ["", _operations(whole, list(present), last, paths)]
    parts += [Text(f"cannot read {f.path}: {f.message}", "red") for f in remarks]
    return Group(*parts)


def render_raw(rings: Sequence[Ring], last: int = 0, comm: str | None = None, paths: bool = False) -> Table:
    """Returns a table with one row per record: the `last` ones of each ring, or all if 0."""
    headings = ("rank", "id", "communicator", "#", "op_id", "operation", "arguments", "state", "called from")
    table = Table(*headings, show_edge=False)
    for ring in rings:
        for record in ring.records[-last:] if last else ring.records:
            owner = ring.comms[int(record["comm"])]
            if comm is not None and owner.name != comm:
                continue
            table.add_row(
                *(str(owner.rank), str(record["id"]), owner.name, str(record["seq"]), str(record["op_id"])),
                ring.op(record),
                arguments(ring, record),
                _cell(ring, record),
                short_path(ring, record) if paths else short_place(ring, record),
            )
    return table


def as_data(rings: Sequence[Ring], remarks: Sequence[InputRemark] = ()) -> dict[str, Any]:
    """Returns the rings as plain data, for `unicomm trace show --json`."""
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
                "trace": to_dict(ring),
            }
            for ring in rings
        ],
        "findings": [{"path": f.path, "message": f.message} for f in remarks],
    }
