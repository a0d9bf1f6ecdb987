"""One-sided operations and those on symmetric memory: issued in order with the others, recorded, with hooks.

They have no sequence number, since not all ranks take part in each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from unicomm.comms.errors import CommError, InvalidArgumentError, MismatchError, UnsupportedError
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.options import Hints, Timeout
from unicomm.comms.streams import on_device
from unicomm.comms.work import Work

from .engine import Engine
from .issued import IssuedOperation


def attempt(engine: Engine, job: Callable[[float], None], limit: float) -> None:
    """Runs `job(limit)` on the communicator's device; aborts the backend if that leaves ranks out of step."""
    try:
        with on_device(engine.member.device) if engine.executor.streams else contextlib.nullcontext():
            job(limit)
    except CommError as error:
        if not isinstance(error, (MismatchError, InvalidArgumentError, UnsupportedError)):
            engine.backend.give_up(error)  # a rank that waits for this one elsewhere must hear of it
        raise


def fail(engine: Engine, name: str, job: Callable[[float], None]) -> NoReturn:
    """Raises the error of `job`, the rest of an operation that a fast path recorded and that failed there."""
    engine.raise_recorded(name, 0, lambda: attempt(engine, job, engine.timeout))
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
    """Issues `job(seconds)` as operation `name`."""
    engine.check_open(name)
    limit = engine.per_op(name, hints, timeout)
    later = bool(async_op)
    call = Call(OPERATIONS[name], list(inputs), list(outputs), peer=peer, timeout=limit, async_op=later)
    # A wait of the device's kernels reports its own timeout, which says more than the watchdog's.
    allowed = limit + (engine.symmetric.grace() if engine.symmetric is not None else 0.0)
    return engine.issue(IssuedOperation(name, (call,), lambda: attempt(engine, job, limit), allowed, later))


def agree(
    engine: Engine, name: str, same: Sequence[int], own: Sequence[int], timeout: Timeout
) -> list[list[int]]:
    """All ranks' `own`, by rank, through the communicator itself. Collective; blocks the host.

    Raises `MismatchError` on all ranks if they are in different operations, or differ in `same`.
    """
    device, size = engine.member.device, engine.group.size
    mine = torch.tensor([OPERATIONS[name].code, *same, *own], dtype=torch.int64, device=device)
    everyone = torch.empty(size * mine.numel(), dtype=torch.int64, device=device)
    engine.collective("all_gather_single", (everyone, mine), False, None, timeout).wait_blocking()
    rows = everyone.view(size, -1).tolist()
    heads = [tuple(row[: 1 + len(same)]) for row in rows]
    if len(set(heads)) > 1:
        most = max(heads, key=heads.count)
        tie = 2 * heads.count(most) <= len(heads)
        raise engine.error(
            MismatchError,
            name,
            "the ranks called different operations, or with tensors, or blocks of memory, of other sizes",
            "pass tensors of the same shape on all ranks, from the same allocations in the same order",
            [r for r, head in enumerate(heads) if tie or head != most],
        )
    return [row[1 + len(same) :] for row in rows]
