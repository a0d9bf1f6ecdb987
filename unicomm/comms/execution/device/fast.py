"""The short path for common calls on a device: collectives and messages of plain tensors.

It checks, numbers and records like the general path, from the same operation table, and hands the issued
operation to the same executor. It prepares nothing for hooks, the profiler, composition or a timeout of its
own: a call that needs any of these, or that is wrong, is left to the general path. So no user can see a
difference, and errors are explained in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unicomm.comms.backend import IssuesDirectly, Prepare
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.fast_path import NoFastPath
from unicomm.comms.execution.hooks import next_op_id
from unicomm.comms.execution.issued import IssuedOperation
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OPERATIONS, Operation, Role, Size

#: Operations that have a short path, if the backend puts them on a stream by itself (`IssuesDirectly`).
SHORT = (
    *("all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("barrier", "send", "recv"),
)


class StreamFast(NoFastPath):
    """The short path of an engine whose operations run on streams.

    It takes the order itself, so that `block` has nothing to do.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        if not isinstance(engine.backend, IssuesDirectly):
            return
        for name in SHORT:
            if (prepare := engine.backend.direct(name)) is not None:
                setattr(self, name, _short(self, engine, OPERATIONS[name], prepare))


def _short(fast: StreamFast, engine: Engine, row: Operation, prepare: Prepare) -> Callable[..., Any]:
    """Makes the operation's method of `StreamFast`; reads the operation table once, here."""
    name, message, reduces = row.name, row.is_message, row.reduces
    n = len(row.tensors)
    rooted = row.rooted or message  # by a rank: the root or the peer
    at_op, at_async = n + rooted, n + rooted + reduces
    reads, writes = _positions(row, Role.OUT), _positions(row, Role.IN)
    rank, size, device, strided = engine.rank, engine.group.size, engine.member.device, torch.strided
    executor, fit = engine.executor, _fit(row, rank, size)
    waits = name == "barrier"

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
        other, op = -1, None
        if rooted:
            other = given[n]
            if other.__class__ is not int or not 0 <= other < size or (message and other == rank):
                return False
        if reduces:
            op = given[at_op]
            if op.__class__ is not ReduceOp:
                return False
        if fit is not None and not fit(*tensors):
            return False
        job = prepare(tensors, other, op)
        if job is None:
            return False
        limit = engine.timeout
        root, peer = (-1, other) if message else (other, -1)
        call = Call(row, tensors[reads], tensors[writes], None, root, peer, op, limit)
        issued = IssuedOperation(name, (call,), job, limit, bool(async_op))
        with engine.order:
            if engine.finalized or engine.broken is not None or engine.vacant is not None:
                return False
            issued.op_id = next_op_id()
            issued.take_numbers(fast)
            work = executor.run(issued)
        if waits and not async_op:
            work.wait()
        return work

    return short


def _positions(row: Operation, excluded: Role) -> slice:
    """Positions of the tensor arguments that are not of the `excluded` role alone."""
    own = [i for i, arg in enumerate(row.tensors) if arg.role is not excluded]
    return slice(own[0], own[-1] + 1) if own else slice(0, 0)


def _fit(row: Operation, rank: int, size: int) -> Callable[..., bool] | None:
    """Makes the check of an operation's output and input; None for an operation with fewer than two tensors.

    The check is whether both have one element type, sizes that fit, and memory that does not overlap, except
    for this rank's own part of an operation that works in place.
    """
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
