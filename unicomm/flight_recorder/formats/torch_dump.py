"""A ring in the format of torch's flight recorder, as plain data which is written as JSON or pickle.

The format is torch's version 2.10 (torch/csrc/distributed/c10d/FlightRecorder.hpp). Torch's analyzer accepts
only torch's backend names, so our backends appear as "gloo", with their own name in `unicomm_backend`. It
also takes a P2P operation for part of the collective with the same number, so P2P numbers begin at 1 000 001.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unicomm.flight_recorder.ring.call_path import user_frame
from unicomm.flight_recorder.ring.reader import (
    ASYNC,
    COMPARED,
    GRAPH,
    INPUT_CHECKSUM,
    OUTPUT_CHECKSUM,
    P2P,
    RECEIVE,
    Comm,
    Ring,
    State,
)
from unicomm.flight_recorder.texts import tell_apart

from .operation_names import SCALAR_TYPES

VERSION = "2.10"
P2P_SEQ_BASE = 1_000_000  # added to P2P numbers, see above
# The backend names that torch's analyzer accepts.
_KNOWN_BACKENDS = frozenset({"nccl", "ncclx", "xccl", "gloo", "rccl", "rcclx", "mccl", "hccl"})
# Torch has no state for a failed operation; it counts as one that has not completed.
_STATES: dict[int, str] = {
    State.CREATED: "scheduled",
    State.STARTED: "started",
    State.COMPLETED: "completed",
    State.FAILED: "started",
}


def to_dict(
    ring: Ring,
    include_completed: bool = True,
    comms: Iterable[int] | None = None,
    after_id: int = 0,
    last: int | None = None,
    records: npt.NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Returns a ring as torch's dump: plain dicts, lists, numbers and texts.

    Args:
        include_completed: whether to include completed operations.
        comms: the indices of the communicators to include; None for all.
        after_id: include only records with a greater id.
        last: the maximum number of operations, the newest ones; None for all.
        records: those of `ring.records` to choose from; None for all.
    """
    wanted = None if comms is None else set(comms)
    records = ring.records if records is None else records
    records = records[records["id"] > after_id]
    if wanted is not None:
        records = records[np.isin(records["comm"], list(wanted))]
    if not include_completed:
        records = records[records["state"] != State.COMPLETED]
    if last is not None:
        records = records[len(records) - min(last, len(records)) :]
    chosen = [c for c in ring.comms if wanted is None or c.index in wanted]
    keys = _keys(ring.comms)
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            keys[c.index]: {
                "name": c.name,
                "desc": c.backend,
                "ranks": json.dumps(c.ranks, separators=(", ", ": ")),
                "unicomm_uid": c.uid,
            }
            for c in chosen
        },
        "pg_status": {
            str(c.index): {
                "last_enqueued_collective": c.coll_created,
                "last_started_collective": c.coll_started,
                "last_completed_collective": c.coll_completed,
            }
            for c in chosen
        },
        "entries": [_entry(ring, record, keys) for record in records],
    }


def _keys(comms: Sequence[Comm]) -> list[str]:
    """Returns the names by which a dump tells its communicators apart; most are those of the communicators.

    Communicators of one name are numbered by their age in the process, so that a name stands for the same one
    in all its dumps. Ranks that are threads share a communicator, which has one name.
    """
    names = {c.uid or str(c.index): c.name for c in comms}
    apart = dict(zip(names, tell_apart([(name, (), "") for name in names.values()]), strict=True))
    return [apart[c.uid or str(c.index)] for c in comms]


def _entry(ring: Ring, record: Any, keys: Sequence[str]) -> dict[str, Any]:
    unknown = Comm(0, "?", "?", "", "", 0, 0, "unknown", 0, 0, 0, 0)
    index = int(record["comm"])
    comm, key = (ring.comms[index], keys[index]) if index < len(ring.comms) else (unknown, unknown.name)
    op, flags = ring.op(record), int(record["flags"])
    backend = comm.backend if comm.backend in _KNOWN_BACKENDS else "gloo"
    p2p = bool(flags & P2P)
    name = f"{backend}:{op}"
    if p2p:
        peer = int(record["peer"])
        name += f" {comm.rank}<-{peer}" if flags & RECEIVE else f" {comm.rank}->{peer}"
    path = ring.call_path(record)
    began, ended = int(record["started_ns"]), int(record["completed_ns"])
    entry: dict[str, Any] = {
        "record_id": int(record["id"]) - 1,
        "pg_id": index,
        "process_group": (key, comm.backend),
        "collective_seq_id": 0 if p2p else int(record["seq"]),
        "p2p_seq_id": P2P_SEQ_BASE + int(record["seq"]) if p2p else 0,
        "op_id": int(record["op_id"]),
        "profiling_name": name,
        "time_created_ns": ring.real_ns(record["created_ns"]),
        "input_sizes": _sizes(ring, record, "in"),
        "input_dtypes": _dtypes(ring, record, "in"),
        "output_sizes": _sizes(ring, record, "out"),
        "output_dtypes": _dtypes(ring, record, "out"),
        "state": _STATES.get(int(record["state"]), "scheduled"),
        "time_discovered_started_ns": ring.real_ns(began) if began else None,
        "time_discovered_completed_ns": ring.real_ns(ended) if ended else None,
        "retired": int(record["state"]) == State.COMPLETED,
        "timeout_ms": int(record["timeout_ms"]),
        "is_p2p": p2p,
        "frames": [{"name": f.function, "filename": f.file, "line": f.line} for f in path],
        "thread_id": str(int(record["tid"])),
        "thread_name": "",
        "unicomm_backend": comm.backend,
        "unicomm_async": bool(flags & ASYNC),
    }
    if path:
        entry["unicomm_user_frame"] = path.index(user_frame(path))
    if graph := flags & GRAPH:
        entry["unicomm_graph"] = graph
    for side, flag in (("input", INPUT_CHECKSUM), ("output", OUTPUT_CHECKSUM)):
        if flags & flag:  # as text: JSON's numbers end at 2^53 in many readers
            entry[f"unicomm_{side}_checksum"] = f"{int(record[f'{side}_checksum']):016x}"
    if flags & COMPARED:
        entry["unicomm_compared"] = True
    if (sent := ring.sent(record)) is not None:
        entry["unicomm_sent_bytes"] = sent
    if began and ended:
        entry["duration_ms"] = (ended - began) / 1e6
    return entry


def _sizes(ring: Ring, record: Any, side: str) -> list[list[int]]:
    """One shape per tensor.

    A record has the first tensor's shape and the elements of all; the other tensors share the remaining ones.
    """
    n, numel = int(record[f"n_{side}"]), int(record[f"{side}_numel"])
    if not n:
        return []
    first = ring.shape(record, side)
    if n == 1:
        return [first]
    each, more = divmod(max(0, numel - math.prod(first)), n - 1)
    return [first, *([each] for _ in range(n - 2)), [each + more]]


def _dtypes(ring: Ring, record: Any, side: str) -> list[str]:
    name = ring.dtype(int(record[f"{side}_dtype"]))
    return [SCALAR_TYPES.get(name, "Undefined") if name else ""] * int(record[f"n_{side}"])
