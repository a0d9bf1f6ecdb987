"""A short way for common calls on a device: collectives and messages of plain tensors.

It checks, numbers and records as the general path does, by the same operation table, but prepares nothing
for hooks, profiler, composition or a timeout of its own: a call that needs any of it, or is wrong, goes
there. So nothing that can be seen differs, errors included, and the other way is the one that explains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.backend import IssuesDirectly
from unicomm.comms.execution.fast_path import NoFastPath
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.execution.point_to_point import NO_SPANS
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.execution.profiling.session import Described, described
from unicomm.comms.operations import recording
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OPERATIONS, Kind, Operation, Role, Size

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine

#: Operations that have a short way, where the backend puts them on a stream by itself (`IssuesDirectly`).
SHORT = (
    *("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("barrier", "send", "recv"),
)


class StreamFast(NoFastPath):
    """That of an engine whose operations run on streams. It needs no blocking, for it holds the order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        if not isinstance(engine.backend, IssuesDirectly):
            return
        for name in SHORT:
            setattr(self, name, _short(self, engine, OPERATIONS[name]))


def _short(fast: StreamFast, engine: Engine, row: Operation) -> Callable[..., Any]:
    """The operation's method of `StreamFast`; what the table says of it is looked up here, once."""
    name, code, message, reduces = row.name, row.code, row.kind is Kind.P2P, row.reduces
    n = len(row.tensors)
    rooted = row.rooted or message  # by a rank: the root or the peer
    at_op, at_async = n + rooted, n + rooted + reduces
    reads, writes = _side(row, Role.OUT), _side(row, Role.IN)
    rank, size, device, strided = engine.rank, engine.group.size, engine.member.device, torch.strided
    begin, index, queue = engine.member.recorder.begin, engine.member.recorder_index, engine.queue
    assert queue is not None
    assert isinstance(engine.backend, IssuesDirectly)
    direct = engine.backend.direct
    frees_in_order, fit = queue.streams.frees_in_order, _fit(row, rank, size)
    send, waits = name == "send", name == "barrier"
    kind = 0 if not message else recording.P2P if send else recording.P2P | recording.RECEIVE

    def short(*given: Any) -> Any:
        async_op, hints, timeout = given[at_async:]
        if hints or timeout is not None or engine.hooks.active or profiling.session is not None:
            return False
        tensors = given[:n]
        for tensor in tensors:
            if (
                tensor.__class__ is not torch.Tensor
                or tensor.device != device
                or tensor.layout is not strided
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or tensor.is_conj()
                or not tensor.data_ptr()
            ):
                return False
        other, op, red = -1, None, 0
        if rooted:
            other = given[n]
            if other.__class__ is not int or not 0 <= other < size or (message and other == rank):
                return False
        if reduces:
            op = given[at_op]
            if op.__class__ is not ReduceOp:
                return False
            red = op.code
        if fit is not None and not fit(*tensors):
            return False
        job = direct(name, tensors, other, op)
        if job is None:
            return False
        inputs, outputs = tensors[reads], tensors[writes]

        def about() -> list[Described]:
            return [described(name, inputs, outputs, *((-1, other) if message else (other, -1)))]

        with engine._order:
            if engine.finalized or engine.broken is not None or engine.vacant is not None:
                return False
            messages: tuple[tuple[bool, int, int], ...] = ()
            if message:
                seq = fast.next_pair_seq(other, send)
                messages = ((send, other, seq),)
            else:
                fast.seq = seq = fast.seq + 1
            limit = engine.timeout
            flags = kind | recording.ASYNC if async_op else kind
            most = min(int(limit * 1000), recording.MOST_MS)
            record = begin(
                index, code, seq, next_op_id(), inputs, outputs, red, other, flags, 0, most, 0, False
            )
            held = tensors if async_op or not frees_in_order else ()
            try:
                work = queue.issue(
                    job, name, seq, (record,), limit, async_op, None, held, messages, NO_SPANS, about
                )
            except BaseException as error:
                engine._failed(error, name, seq, (record,))
                raise
        if waits and not async_op:
            work.wait()
        return work

    return short


def _side(row: Operation, other: Role) -> slice:
    """Where the tensors are that have not the other role alone."""
    own = [i for i, arg in enumerate(row.tensors) if arg.role is not other]
    return slice(own[0], own[-1] + 1) if own else slice(0, 0)


def _fit(row: Operation, rank: int, size: int) -> Callable[..., bool] | None:
    """Whether an output and an input have one type, sizes that belong together, and memory of their own,
    but for this rank's part where the operation works in place. None without two."""
    if len(row.tensors) < 2:
        return None
    gathers, scatters = (arg.size is Size.WORLD for arg in row.tensors)
    times = size if gathers else 1
    parts = size if scatters or row.shared else 1

    def fit(output: torch.Tensor, input: torch.Tensor) -> bool:
        there, here, count = output.data_ptr(), input.data_ptr(), input.numel()
        if output.dtype is not input.dtype or count % parts:
            return False
        if output.numel() != (count // size if scatters else count * times):
            return False
        into, of = output.nbytes, input.nbytes
        if there + into <= here or here + of <= there:
            return True
        if gathers:
            return bool(here == there + rank * of)
        return bool(scatters and there == here + rank * into)

    return fit
