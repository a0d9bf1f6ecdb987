"""Annotations of operations captured in CUDA graphs, put onto the kernels that the graphs replay.

A replayed graph runs no Python, so its kernels have no events of their own, only the one around the launch.
`graph_annotations` therefore records, for each operation issued during a capture, the graph nodes that it
made (torch.cuda._graph_annotations, torch 2.12 and later). A profiler's trace names the node of each replayed
kernel, and `annotate` joins the two.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicomm.flight_recorder.memory import Memory, needed_by_json
from unicomm.flight_recorder.ring.files import read_file

from .chrome import Event, Progress, Reader, TraceError, Writer, replacing

if TYPE_CHECKING:
    from unicomm.comms.communicator import Communicator
    from unicomm.comms.execution.hooks import RemovableHandle
    from unicomm.comms.operations.call import OpArgs

_VERSION = 1
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_NODE = "graph node id"
_MARK = "unicomm"  # the key that all of our annotations have
Mark = Callable[[dict[str, Any]], contextlib.AbstractContextManager[None]]


class GraphAnnotations:
    """Annotates operations that are issued while a CUDA graph is captured.

        annotations = unicomm.profiler.graph_annotations(comm)
        with torch.cuda.graph(graph, enable_annotations=True):
            comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
        annotations.save("rank0.annotations.json")

    `records` holds the operations issued during captures: name, communicator, bytes, and the sequence number
    at the capture, which all replays share. Outside a capture each operation costs the call of a hook.
    """

    def __init__(self, mark: Mark | None = None, capturing: Callable[[], bool] | None = None) -> None:
        """Use `graph_annotations`. Tests without a GPU replace torch by `mark` and `capturing`."""
        self._mark = _torch_mark if mark is None else mark
        self._capturing = _torch_capturing if capturing is None else capturing
        self._handles: list[RemovableHandle] = []
        self._open: dict[int, contextlib.AbstractContextManager[None]] = {}
        self.records: list[dict[str, Any]] = []

    def register_with_comm(self, comm: Communicator) -> None:
        name, uid = comm.get_name(), comm.get_uid()

        def before(op: Any, op_id: int, args: OpArgs) -> None:
            if not self._capturing():
                return
            sent = [m.tensor for m in args.messages]
            sides = [list(args.inputs) or sent, list(args.outputs)]
            record = {
                _MARK: args.name,
                "comm": name,
                "comm_uid": uid,
                "group_size": comm.get_size(),
                "rank": comm.get_rank(),
                "seq_num at capture": args.seq,
                "bytes": max(sum(t.numel() * t.element_size() for t in side) for side in sides),
            }
            self.records.append(record)
            scope = self._mark(record)
            scope.__enter__()
            self._open[op_id] = scope

        def after(op: Any, op_id: int, args: OpArgs) -> None:
            scope = self._open.pop(op_id, None)
            if scope is not None:
                scope.__exit__(None, None, None)

        self._handles += [comm.register_pre_hook(before), comm.register_post_hook(after)]

    def remove(self) -> None:
        """Removes the hooks; the records stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()  # operations that failed have left entries

    def save(self, path: Path | str, kernels: Mapping[int, list[Any]] | None = None) -> int:
        """Writes the annotations by graph node, after the capture; returns the number of annotated nodes.

        `kernels` are all annotations; default: `torch.cuda._graph_annotations.get_kernel_annotations()`.
        """
        if kernels is None:
            from unicomm.c10d.compat import kernel_annotations

            kernels = kernel_annotations()
        ours = {
            str(node): own
            for node, found in kernels.items()
            if (own := [a for a in found if isinstance(a, dict) and _MARK in a])
        }
        Path(path).write_text(json.dumps({"version": _VERSION, "kernels": ours}, indent=1))
        return len(ours)


def graph_annotations(*comms: Communicator) -> GraphAnnotations:
    """Begins to annotate the captured operations of the communicators `comms`; see `GraphAnnotations`."""
    out = GraphAnnotations()
    for comm in comms:
        out.register_with_comm(comm)
    return out


def _torch_capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _torch_mark(annotation: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    from unicomm.c10d.compat import mark_kernels

    scope = mark_kernels(annotation)
    if scope is None:
        raise TraceError("this torch cannot annotate CUDA graphs: it needs 2.12 or later")
    return scope


def annotate(
    trace: Path | str,
    annotations: Path | str,
    output: Path | str,
    progress: Progress | None = None,
    memory: int | None = None,
) -> int:
    """Copies `trace`, adds annotations to the arguments of replayed kernels, and returns their number.

    Calls `progress(done, total)` with numbers of bytes.
    `memory`: bytes that the annotations, and what stands around the events, may need; half of the free memory
    if None. Raises `TraceError` when an input is unusable; `output` then does not exist.
    """
    room = Memory(memory, TraceError)
    by_node = _read(Path(annotations), room)
    target = Path(output)
    if not target.name.endswith((".json", ".json.gz")):
        raise TraceError(f"{target}: the name has to end in .json or .json.gz")
    if target.exists() and Path(trace).exists() and target.samefile(trace):
        raise TraceError(f"{target} is the trace itself; choose another name for the output")
    count = 0
    with replacing(target) as part, Reader(trace, memory=room) as reader:
        writer = Writer(part, reader.head)
        try:
            for piece in reader.pieces():
                count += sum(_annotate(e, by_node) for e in piece)
                writer.write(piece)
                if progress is not None:
                    progress(reader.position, reader.size)
        finally:
            writer.close(reader.tail)
    return count


def _annotate(e: Event, by_node: dict[int, dict[str, Any]]) -> bool:
    if e.get("cat") not in _WORK:
        return False
    arguments = e.get("args")
    if not isinstance(arguments, dict) or (found := by_node.get(arguments.get(_NODE, 0))) is None:
        return False
    e["args"] = arguments | found
    return True


def _read(path: Path, memory: Memory) -> dict[int, dict[str, Any]]:
    try:
        memory.check(path.stat().st_size, path)
        text = read_file(path)
        memory.take(needed_by_json(text), path)
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']} is not known")
        out: dict[int, dict[str, Any]] = {}
        for node, found in data["kernels"].items():
            merged: dict[str, Any] = {}
            for one in found:
                merged |= one
            out[int(node)] = merged
        return out
    except TraceError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise TraceError(
            f"{path} holds no annotations ({error!r}); graph_annotations(...).save writes them"
        ) from None
