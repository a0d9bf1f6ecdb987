"""Typed records of one rank's operations, from a profiler or from the trace that it wrote."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicomm.flight_recorder.memory import Memory
from unicomm.flight_recorder.ring.reader import STATES

from .chrome import EXACT, Reader, TraceError, base_of, nanoseconds
from .trace_table import KEY, Group, TraceTable, read

if TYPE_CHECKING:
    import torch

PREFIX = "unicomm::"
_EVENT = 200  # bytes that are kept of an event of a trace
_FLOWS = {"fwdbwd": 1, "ac2g": 2}  # Kineto's numbers of these kinds of flows
# What torch's traces have among the arguments of an event besides those of the operation.
_NOT_ARGUMENTS = (
    *("Record function id", "Ev Idx", "Concrete Inputs", "Input type", "Input Strides", "Input Dims"),
    "finished",
)
# The columns that become fields of a CommEvent as they are.
_SAME = (
    *("op", "seq_num", "in_elements", "out_elements", "dtype", "bytes", "batch", "captured_seq"),
    *("issued_ns", "started_ns", "completed_ns", "thread"),
)
# Fields that torch 2.11 does not provide in Python, though its traces have them.
NOT_IN_OLD_TORCH = {
    "activity_type": str,
    "external_id": int,
    "flow_id": int,
    "flow_type": int,
    "flow_start": bool,
}


@dataclass(frozen=True)
class CommEvent:
    """One operation of one rank.

    Attributes:
        op, seq_num: the operation and its sequence number, which is the same on all ranks, in the recorder
            and in errors. Messages are numbered per pair and direction; one received from any source has 0.
        group: the communicator, with name, uid, the process group's name and description, and ranks.
        in_elements, out_elements: the numbers of elements of all inputs and of all outputs. `bytes`: the
            larger of the two, in bytes.
        dtype: the tensors' element type, "" for a barrier.
        root, peer: rank in the group, None where the operation has none.
        in_splits, out_splits: the number of rows for each rank, None where the parts are equal.
        batch: the number of the batch of messages that run together, 0 for others.
        replay: the replay of its graph in which it ran, from 1; 0 for an operation that was called. Its times
            are those of the whole replay. One more record with the op "replay" stands for the replay itself:
            its seq_num and captured_seq are those of its first collective, its sizes are the sums.
        captured_seq: in a replay, the sequence number of the captured call, the same on all ranks.
        captured: whether the call was captured by a graph: it ran nothing, and its times are of the call.
        state: created, started, completed or failed, when the recording ended.
        issued_ns, started_ns, completed_ns: nanoseconds since 1970; 0 when that had not happened yet.
        thread: the issuing thread's number in the operating system.

    Fields of the event in torch's trace, None or 0 when torch did not record the thread:
        start_ns, duration_ns: the run of a synchronous operation, the issue of an asynchronous one.
        activity_type, external_id, flow_id, flow_type (0 none, 1 forward to backward, 2 to a kernel),
        flow_start: torch's values.
        arguments: the arguments of the event; empty without `record_shapes=True`.
        stack: the Python functions around the event, innermost first; empty without `with_stack=True`.
    """

    op: str
    seq_num: int
    group: Group
    is_async: bool
    in_elements: int
    out_elements: int
    dtype: str
    bytes: int
    root: int | None
    peer: int | None
    in_splits: tuple[int, ...] | None
    out_splits: tuple[int, ...] | None
    batch: int
    replay: int
    captured_seq: int
    captured: bool
    state: str
    issued_ns: int
    started_ns: int
    completed_ns: int
    thread: int
    start_ns: int | None = None
    duration_ns: int = 0
    activity_type: str = ""
    external_id: int = 0
    flow_id: int = 0
    flow_type: int = 0
    flow_start: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    stack: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The event's name in the trace."""
        return PREFIX + self.op

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self.group.rank

    @property
    def finished(self) -> bool:
        """Whether it had completed or failed when the recording ended."""
        return self.state in ("completed", "failed")


@dataclass
class _Seen:
    """An event `unicomm::*` of torch's trace."""

    thread: int
    name: str
    start_ns: int
    found: dict[str, Any]  # fields of CommEvent


def events(prof: torch.profiler.profile) -> list[CommEvent]:
    """Returns all operations that were issued while `prof` recorded, in the order of their issue.

    `prof` is a stopped `torch.profiler.profile`, in `on_trace_ready` or after its block. `read_events(path)`
    returns the same records from the trace that it writes. Raises `TraceError` when `prof` has recorded
    nothing, or when its table is no longer kept (only the last four recordings are).

    With torch 2.11 flows, correlation numbers and Python functions are missing; `read_events` has them.
    """
    results = getattr(getattr(prof, "profiler", None), "kineto_results", None)
    if results is None:
        raise TraceError("the profiler has not recorded anything; call this after its block has ended")
    from unicomm.comms.execution.profiling import events as profiling

    if not profiling.supported:
        raise TraceError("unicomm cannot hook into the profiler of this torch version; see docs/profiler.md")
    begun = results.trace_start_ns()
    for session in reversed(profiling.finished):
        if session.started_ns <= begun <= session.stopped_ns:
            return list(_joined(read(session.table, "the profiler"), _from_results(results.events())))
    if any(e.name().startswith(PREFIX) for e in results.events()):
        raise TraceError("the recording is too old to be kept in memory: use read_events on its trace")
    return []


def read_events(path: Path | str, memory: int | None = None) -> list[CommEvent]:
    """Returns the same records from the Chrome trace at `path`, `.gz` or not.

    Raises `TraceError` if it has no table.

    `memory`: bytes that the trace may need; half of the free memory if None.
    """
    room = Memory(memory, TraceError)
    table: Any = None
    seen: list[_Seen] = []
    frames: dict[int, list[tuple[int, int, str]]] = {}
    flows: dict[tuple[int, int], tuple[int, int, bool]] = {}
    with Reader(path, memory=room) as reader:
        for piece in reader.pieces_as(EXACT):
            room.take(_EVENT * len(piece), path)
            for e in piece:
                kind = e.get("ph")
                if kind == "X":
                    start, duration = nanoseconds(e["ts"]), nanoseconds(e.get("dur", 0))
                    if str(e.get("name", "")).startswith(PREFIX) and not e["name"].endswith(" (run)"):
                        seen.append(_from_json(e, start, duration))
                    elif e.get("cat") == "python_function":
                        frames.setdefault(e["tid"], []).append((start, start + duration, e["name"]))
                elif kind in ("s", "f"):
                    at = (e["tid"], nanoseconds(e["ts"]))
                    flows[at] = (int(e["id"]), _FLOWS.get(e.get("cat", ""), 0), kind == "s")
        facts = reader.head | reader.tail
        table = facts.get(KEY)
        base = base_of(facts, path)
    if table is None:
        raise TraceError(f"{path} holds no table of unicomm; did the program use it while it was profiled?")
    for one in seen:
        flow = flows.get((one.thread, one.start_ns))
        if flow is not None:
            one.found |= dict(zip(("flow_id", "flow_type", "flow_start"), flow, strict=True))
    _add_stacks(seen, frames)
    for one in seen:
        one.start_ns += base
    return list(_joined(read(table, str(path)), seen))


def _from_json(e: dict[str, Any], start: int, duration: int) -> _Seen:
    own = dict(e.get("args", {}))
    number = int(own.pop("External id", 0))
    for key in _NOT_ARGUMENTS:
        own.pop(key, None)
    found = {
        "duration_ns": duration,
        "activity_type": e.get("cat", ""),
        "external_id": number,
        "arguments": own,
    }
    return _Seen(int(e["tid"]), e["name"], start, found)


def _from_results(results: Iterable[Any]) -> list[_Seen]:
    seen: list[_Seen] = []
    frames: dict[int, list[tuple[int, int, str]]] = {}
    for e in results:
        name, thread = e.name(), e.device_resource_id()
        if name.startswith(PREFIX) and not name.endswith(" (run)"):
            found = {"duration_ns": e.duration_ns(), "arguments": dict(e.kwinputs())}
            found |= {
                name: kind(getattr(e, name)()) for name, kind in NOT_IN_OLD_TORCH.items() if hasattr(e, name)
            }
            seen.append(_Seen(thread, name, e.start_ns(), found))
        elif hasattr(e, "is_python_function") and e.is_python_function():
            frames.setdefault(thread, []).append((e.start_ns(), e.end_ns(), name))
    _add_stacks(seen, frames)
    return seen


def _add_stacks(seen: list[_Seen], frames: dict[int, list[tuple[int, int, str]]]) -> None:
    """Finds the functions that were running when each event began, by time: calls of one thread nest."""
    by_thread: dict[int, list[_Seen]] = {}
    for one in seen:
        by_thread.setdefault(one.thread, []).append(one)
    for thread, mine in by_thread.items():
        calls = sorted(frames.get(thread, ()), key=lambda f: (f[0], -f[1]))
        starts = [c[0] for c in calls]
        mine.sort(key=lambda s: s.start_ns)
        open_: list[tuple[int, int, str]] = []
        done = 0
        for one in mine:
            until = bisect_right(starts, one.start_ns)
            for call in calls[done:until]:
                while open_ and open_[-1][1] <= call[0]:
                    open_.pop()
                open_.append(call)
            done = until
            while open_ and open_[-1][1] <= one.start_ns:
                open_.pop()
            one.found["stack"] = tuple(call[2] for call in reversed(open_))


def _joined(table: TraceTable, seen: list[_Seen]) -> Iterator[CommEvent]:
    """Joins rows and events: the k-th traced row of a thread belongs to the thread's k-th event."""
    queues: dict[int, deque[_Seen]] = {}
    for one in sorted(seen, key=lambda s: s.start_ns):
        queues.setdefault(one.thread, deque()).append(one)
    for values in zip(*table.columns.values(), strict=True):
        row = dict(zip(table.columns, values, strict=True))
        queue = queues.get(row["thread"]) if row["traced"] else None
        # The last events may be missing, because torch stops recording before unicomm does.
        event = queue.popleft() if queue and queue[0].name == PREFIX + row["op"] else None
        more = {} if event is None else {"start_ns": event.start_ns, **event.found}
        yield CommEvent(
            **{name: row[name] for name in _SAME},
            group=table.groups[row["group"]],
            is_async=bool(row["is_async"]),
            root=None if row["root"] < 0 else row["root"],
            peer=None if row["peer"] < 0 else row["peer"],
            in_splits=_splits(row["in_splits"]),
            out_splits=_splits(row["out_splits"]),
            replay=max(row["replay"], 0),
            captured=row["replay"] < 0,
            state=STATES[row["state"]],
            **more,
        )


def _splits(text: str) -> tuple[int, ...] | None:
    return tuple(int(n) for n in text.split(",")) if text else None
