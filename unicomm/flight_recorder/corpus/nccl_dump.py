"""nccl_dump: a simulated rank as the dump that torch's NCCL group would have written; nccl_table: all ranks.

The entries follow torch's ProcessGroupNCCL (version 2.10 of the format):

- A group counts its collectives and its messages; every entry has both numbers.
- An uneven all_gather is one `_broadcast_oop` per rank of the group, and an uneven reduce_scatter one
  `_reduce_oop`, all with one number, and then "nccl:ALLGATHER_coalesced" or "nccl:REDUCE_SCATTER_coalesced".
- Coalesced calls and the messages of a batch have one number, and then "nccl:coalesced".
- Only the last entry has no sizes, and only it has times and a state other than "scheduled".
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from unicomm.flight_recorder.formats.dump_columns import from_dump
from unicomm.flight_recorder.formats.operation_names import SCALAR_TYPES
from unicomm.flight_recorder.formats.torch_dump import VERSION
from unicomm.flight_recorder.table.builder import TableBuilder
from unicomm.flight_recorder.table.table import Table

from .simulated_job import Action, Event, SimulatedJob

_BEGAN_NS = 1_700_000_000_000_000_000
_NAMES = {
    "all_gather_single": "_all_gather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
}
_UNEVEN = {
    "all_gather_v": ("_broadcast_oop", "ALLGATHER_coalesced"),
    "reduce_scatter_v": ("_reduce_oop", "REDUCE_SCATTER_coalesced"),
}
_Sizes = tuple[Sequence[int], Sequence[int]]


def nccl_dump(job: SimulatedJob, rank: int) -> dict[str, Any]:
    """Returns the dump of a rank, with its newest `job.capacity` entries."""
    entries = _Entries(job, rank)
    for _, several in groupby(job.events[rank], key=lambda e: e.call.batch or id(e)):
        entries.add(list(several))
    own = [name for name, ranks in job.groups.items() if rank in ranks]
    return {
        "version": VERSION,
        "comm_lib_version": "2.27.5",
        "pg_config": {
            name: {"name": name, "desc": "undefined", "ranks": json.dumps(list(job.groups[name]))}
            for name in own
        },
        "pg_status": {
            str(number): {
                "last_enqueued_collective": entries.enqueued[name],
                "last_started_collective": entries.started[name],
                "last_completed_collective": entries.completed[name],
            }
            for number, name in enumerate(own)
        },
        "entries": entries.all[-job.capacity :],
    }


def nccl_table(job: SimulatedJob) -> Table:
    """Returns the table of all ranks' dumps."""
    builder = TableBuilder()
    for rank in range(job.size):
        columns = from_dump(nccl_dump(job, rank))
        builder.add_dump(columns, f"nccl_trace_rank_{rank}", rank, "torch pickle")
    return builder.finish()


class _Entries:
    """The entries of one rank, with the counters of its groups."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.all: list[dict[str, Any]] = []
        self.enqueued: dict[str, int] = defaultdict(lambda: -1)
        self.started: dict[str, int] = defaultdict(lambda: -1)
        self.completed: dict[str, int] = defaultdict(lambda: -1)
        self._messages: dict[str, int] = defaultdict(int)
        self._numbers = {name: i for i, name in enumerate(n for n, r in job.groups.items() if rank in r)}

    def add(self, events: list[Event]) -> None:
        """Adds the entries of one event, or of the messages of a batch."""
        first, last = events[0], max(events, key=lambda e: e.completed or 1 << 62)
        call = first.call
        if call.op in ("send", "recv"):
            self._messages[call.group] += 1
            for event in events:
                sizes = ([event.call.numel],) * 2
                self._entry(event, self._message(event.call), sizes, None if call.batch else event)
            if call.batch:
                self._entry(first, "coalesced", ([], []), last)
            return
        self.enqueued[call.group] = first.seq
        if first.started:
            self.started[call.group] = first.seq
        if first.completed:
            self.completed[call.group] = first.seq
        if call.parts:
            part, end = _UNEVEN[call.op]
            for size in call.parts:
                self._entry(first, part, ([size], [size]))
            self._entry(first, end, ([], []), first)
        elif call.calls:
            for one in call.calls:
                self._entry(first, _NAMES.get(one.op, one.op), _sizes(one), None, one)
            self._entry(first, "coalesced", ([], []), first)
        else:
            self._entry(first, _NAMES.get(call.op, call.op), _sizes(call), first)

    def _message(self, call: Action) -> str:
        ranks = list(self.job.groups[call.group])
        arrow = "->" if call.op == "send" else "<-"
        return f"{call.op} {ranks.index(self.rank)}{arrow}{ranks.index(call.peer)}"

    def _entry(
        self, at: Event, name: str, sizes: _Sizes, work: Event | None = None, call: Action | None = None
    ) -> None:
        """Adds an entry. `work` is the event whose progress it shows; None for one without a state."""
        group = at.call.group
        shift = _BEGAN_NS + self.job.skew_ns.get(self.rank, 0)
        dtype = SCALAR_TYPES[(call or at.call).dtype]
        started = bool(work and work.started)
        completed = bool(work and work.completed)
        end = not sizes[0] and not sizes[1]
        self.all.append(
            {
                "record_id": len(self.all),
                "pg_id": self._numbers[group],
                "process_group": (group, "undefined"),
                "collective_seq_id": max(self.enqueued[group], 0),
                "p2p_seq_id": self._messages[group],
                "op_id": len(self.all),
                "profiling_name": f"nccl:{name}",
                "time_created_ns": at.created + shift,
                "input_sizes": [] if end else [list(sizes[0])],
                "input_dtypes": [] if end else [dtype],
                "output_sizes": [] if end else [list(sizes[1])],
                "output_dtypes": [] if end else [dtype],
                "state": "completed" if completed else "started" if started else "scheduled",
                "time_discovered_started_ns": at.created + shift if started else None,
                "time_discovered_completed_ns": work.completed + shift if work and completed else None,
                "retired": completed,
                "timeout_ms": 600_000,
                "is_p2p": at.call.op in ("send", "recv"),
                "frames": [{"name": "train_step", "filename": "/job/train.py", "line": at.call.line}],
                "thread_id": "1",
                "thread_name": "",
            }
        )


def _sizes(call: Action) -> _Sizes:
    return [call.numel], [call.numel if call.out_numel < 0 else call.out_numel]
