"""Collectives on symmetric tensors. All ranks pass the same allocations; the results are those of a
communicator's collectives.

`comm` is the communicator, or the team, whose ranks take part. `op` is a reduction: "sum", "product", "min"
or "max". `relaxed=True` leaves out the barrier at the end. `timeout` is in seconds, by default the
communicator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.operations.numbers import as_index
from unicomm.comms.operations.table import OPERATIONS

from .exchange import Exchange, Refusal, done_fast, fast_of
from .memory import synchronize

Timeout = timedelta | float | None


def broadcast(
    tensor: torch.Tensor, root: int, comm: Communicator, *, relaxed: bool = False, timeout: Timeout = None
) -> torch.Tensor:
    """Copies the root's `tensor` into all ranks' copies, and returns it."""
    op = "symm_broadcast"
    if done_fast(op, comm, "broadcast", tensor, root, relaxed, timeout):
        return tensor
    call = Exchange(op, comm, timeout, relaxed)
    (tensor,) = call.symmetric(tensor=tensor)
    root = call.root("root", root)
    call.run(lambda head: call.domain.broadcast(head, tensor), [tensor], [tensor], root=root)
    return tensor


def all_to_all(
    input: torch.Tensor,
    out: torch.Tensor,
    comm: Communicator,
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> torch.Tensor:
    """Block p of `out` becomes block r of rank p's `input`, r being this rank; n equal blocks each.

    With `relaxed` others may still read `input` when it returns.
    """
    op = "symm_all_to_all"
    if done_fast(op, comm, "all_to_all", input, out, relaxed, timeout):
        return out
    call = Exchange(op, comm, timeout, relaxed)
    input, out = call.symmetric(input=input, out=out)
    call.apart(input=input, out=out)
    call.same_dtype(input, out)
    if input.numel() != out.numel() or input.numel() % call.size:
        call.fail(
            f"input has {input.numel()} elements, out {out.numel()}, for {call.size} ranks",
            "make both of n equal blocks",
        )
    call.run(lambda head: call.domain.all_to_all(head, input, out), [input], [out])
    return out


def all_to_all_v(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: Sequence[int],
    comm: Communicator,
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> list[int]:
    """Sends `in_splits[p]` rows of `input` to rank p, one block after the other; returns what came from each.

    What came lies in `out` by rank, without gaps; rows behind it stay as they are. `InvalidArgumentError` on
    all ranks, and nothing written, when one rank's `out` is too small.
    """
    op = "symm_all_to_all_v"
    done = fast_of(comm).all_to_all_v(OPERATIONS[op].code, input, out, in_splits, relaxed, timeout)
    if isinstance(done, list):
        return done
    call = Exchange(op, comm, timeout, relaxed)
    if done is not False:
        call.fast_failed(done, "in_splits", input, out)
    input, out = call.symmetric(input=input, out=out)
    call.apart(input=input, out=out)
    call.same_dtype(input, out)
    call.same_rows(input, out)
    try:
        splits = [as_index(n) for n in in_splits]
    except TypeError:
        call.fail(f"in_splits={in_splits!r}", "pass whole numbers, one for each rank")
    if len(splits) != call.size or min(splits) < 0 or sum(splits) > input.shape[0]:
        call.fail(
            f"in_splits={splits} for {call.size} ranks and {input.shape[0]} rows",
            "one number for each rank, 0 or more, together at most the rows of input",
        )
    received: list[int] = []

    def steps(head: Any) -> tuple[Any, Refusal]:
        fault, refusal, received[:] = call.domain.all_to_all_v(head, input, out, splits)
        return fault, refusal

    call.run_rows(steps, "in_splits", input, [out])
    if not received:
        synchronize(comm, timeout)  # a device has recorded a failure, of this operation or an earlier one
    return received


def one_shot_all_reduce(
    input: torch.Tensor,
    comm: Communicator,
    op: str = "sum",
    *,
    out: torch.Tensor | None = None,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> torch.Tensor:
    """The reduction of all ranks' `input`, in `out` (any tensor) or a new one: each rank reads all.

    `op` is "sum", "product", "min" or "max". All ranks get the same bits. For small tensors.
    """
    name = "one_shot_all_reduce"
    if out is not None and done_fast(name, comm, "one_shot", input, out, op, relaxed, timeout):
        return out
    call = Exchange(name, comm, timeout, relaxed)
    (input,) = call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    result = call.memory.check_tensor(
        call.op, "out", torch.empty_like(input) if out is None else out, input.dtype
    )
    if result.numel() != input.numel():
        call.fail(f"input has {input.numel()} elements, out {result.numel()}", "make them of one size")
    call.apart(input=input, out=result)

    call.run(lambda head: call.domain.one_shot(head, input, result), [input], [result], red=red)
    return result


def two_shot_all_reduce_(
    input: torch.Tensor, comm: Communicator, op: str = "sum", *, timeout: Timeout = None
) -> torch.Tensor:
    """Replaces all ranks' `input` by its reduction: each reduces a part and writes it to all."""
    name = "two_shot_all_reduce_"
    if done_fast(name, comm, "two_shot", input, op, timeout):
        return input
    call = Exchange(name, comm, timeout)
    (input,) = call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    call.run(lambda head: call.domain.two_shot(head, input), [input], [input], red=red)
    return input


def reduce_scatter(
    input: torch.Tensor,
    out: torch.Tensor,
    comm: Communicator,
    op: str = "sum",
    *,
    split_last_dim: bool = False,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> torch.Tensor:
    """`out` becomes this rank's part of the reduction of all ranks' `input`.

    The r-th of n equal parts, or with `split_last_dim` the r-th slice of the last dimension. `out` may be any
    tensor of that many elements.
    """
    name = "symm_reduce_scatter"
    if done_fast(name, comm, "reduce_scatter", input, out, op, split_last_dim, relaxed, timeout):
        return out
    call = Exchange(name, comm, timeout, relaxed)
    (input,) = call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    out = call.memory.check_tensor(call.op, "out", out, input.dtype)
    width = input.shape[-1] if split_last_dim and input.dim() else input.numel()
    if width % call.size or out.numel() * call.size != input.numel():
        call.fail(
            f"input {tuple(input.shape)} and out {tuple(out.shape)} for {call.size} ranks",
            "what is split must be n equal parts, and out one of them",
        )
    call.apart(input=input, out=out)
    rows = input.numel() // max(width, 1)
    call.run(lambda head: call.domain.reduce_scatter(head, input, out, rows), [input], [out], red=red)
    return out
