"""How an operation on symmetric memory runs: in issue order with the others, recorded, with hooks.

It has no sequence number, for not all ranks take part in each, and its record stands among those that are no
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from unicomm.comms.errors import CommError, InvalidArgumentError, MismatchError, UnsupportedError
from unicomm.comms.execution.profiling.session import described
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import OpArgs
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.work import Work

from .hooks import next_op_id
from .profiling import events as profiling
from .streams import on_device

if TYPE_CHECKING:
    from unicomm.comms.options import Hints, Timeout

    from .engine import Engine


def attempt(engine: Engine, job: Callable[[float], None], limit: float) -> None:
    """Runs `job`, on its device; when that leaves the ranks out of step, ends what others wait for."""
    try:
        if engine.queue is None:
            job(limit)
        else:
            with on_device(engine.member.device):
                job(limit)
    except CommError as error:
        if not isinstance(error, (MismatchError, InvalidArgumentError, UnsupportedError)):
            engine.backend.abort()  # who waits for this rank elsewhere must hear of it
        raise


def fail(engine: Engine, name: str, job: Callable[[float], None]) -> NoReturn:
    """Raises what `job` does, as an operation that failed in a fast path, where it was recorded."""
    engine._execute(lambda: attempt(engine, job, engine.timeout), name, 0, [], False, None)
    raise AssertionError("an error was expected")


def issue(
    engine: Engine,
    name: str,
    job: Callable[[float], None],
    *,
    inputs: Sequence[torch.Tensor] = (),
    outputs: Sequence[torch.Tensor] = (),
    peer: int = -1,
    async_op: bool = False,
    hints: Hints = None,
    timeout: Timeout = None,
) -> Work:
    """Runs `job(seconds)` as operation `name`, here or, behind asynchronous ones, in the worker."""
    engine.check_open(name)
    limit = engine.per_op(name, hints, timeout)
    pending_async = bool(async_op)

    def run() -> None:
        attempt(engine, job, limit)

    with engine._in_order():
        engine.check_open(name)
        if not pending_async:
            engine.check_can_wait(name)
        op_id = next_op_id()
        args = None
        if engine.hooks.active:
            args = OpArgs(name, op_id, 0, inputs, outputs, peer=peer, async_op=pending_async, timeout=limit)
            engine.hooks.before(args)
        on_device = engine.queue is not None
        pending = not on_device and (pending_async or engine.worker.busy)
        record = engine._recorder.begin(
            engine._recorder_index,
            OPERATIONS[name].code,
            0,
            op_id,
            list(inputs),
            list(outputs),
            0,
            peer,
            recording.ASYNC if pending_async else 0,
            0,
            min(int(limit * 1000), recording.MOST_MS),
            0,
            not pending and not on_device,
        )
        tensors = (*inputs, *outputs)
        observed: profiling.Job = run, ()
        if profiling.session is not None:
            observed = profiling.one_sided(engine, name, inputs, outputs, peer, pending, pending_async, run)
        allowed = limit + (engine.symmetric.grace() if engine.symmetric is not None else 0.0)
        work = engine._run(
            *(observed[0], name, 0, [record], pending, pending_async, allowed, args, tensors),
            spans=observed[1],
            about=lambda: [described(name, inputs, outputs, peer=peer)],
        )
    if pending and not pending_async:
        work.wait()
    if args is not None:
        engine.hooks.after(args)
    return work


def agree(
    engine: Engine, name: str, same: Sequence[int], own: Sequence[int], timeout: Timeout
) -> list[list[int]]:
    """All ranks' `own`, by rank, through the communicator itself. Collective; blocks the host.

    Raises `MismatchError` on all ranks where they are in different operations, or differ in `same`.
    """
    said = torch.tensor([OPERATIONS[name].code, *same, *own], dtype=torch.int64)
    mine, everyone = (
        said.to(engine.member.device),
        torch.empty(engine.group.size * said.numel(), dtype=torch.int64, device=engine.member.device),
    )
    engine.collective("all_gather_single", (everyone, mine), False, None, timeout).wait_blocking()
    rows = everyone.view(engine.group.size, -1).tolist()
    heads = [tuple(row[: 1 + len(same)]) for row in rows]
    if len(set(heads)) > 1:
        most = max(heads, key=heads.count)
        tie = 2 * heads.count(most) <= len(heads)
        raise MismatchError(
            "the ranks called different operations, or with tensors, or blocks of memory, of other sizes",
            op=name,
            comm=engine.name,
            rank=engine.rank,
            culprits=[r for r, head in enumerate(heads) if tie or head != most],
            hint="pass tensors of the same shape on all ranks, from the same allocations in the same order",
        )
    return [row[1 + len(same) :] for row in rows]
