"""Collectives on symmetric tensors. All ranks pass the same allocations; the results are those of a
communicator's collectives."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from datetime import timedelta

import torch

from unicomm import _core
from unicomm.comms.communicator import Communicator
from unicomm.comms.ops import OPERATIONS

from .exchange import Exchange, row_bytes

Timeout = timedelta | float | None


def broadcast(
    tensor: torch.Tensor, root: int, comm: Communicator, *, relaxed: bool = False, timeout: Timeout = None
) -> torch.Tensor:
    """Copies the root's `tensor` into all ranks' copies, and returns it."""
    call = Exchange("symm_broadcast", comm, timeout, relaxed)
    call.symmetric(tensor=tensor)
    root = call.memory.engine.check.check_rank(OPERATIONS[call.op], "root", root)

    def steps() -> None:
        call.meet([tensor], [root])
        if call.rank != root:
            call.fetch([(tensor.data_ptr(), tensor.data_ptr(), tensor.nbytes, root)])

    call.run(steps, [tensor], [tensor])
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
    call = Exchange("symm_all_to_all", comm, timeout, relaxed)
    call.symmetric(input=input, out=out)
    call.apart(input=input, out=out)
    call.same_dtype(input, out)
    if input.numel() != out.numel() or input.numel() % call.size:
        call.fail(
            f"input has {input.numel()} elements, out {out.numel()}, for {call.size} ranks",
            "make both of n equal blocks",
        )
    block = input.nbytes // call.size

    def steps() -> None:
        call.meet([input, out])
        call.fetch(
            [
                (out.data_ptr() + p * block, input.data_ptr() + call.rank * block, block, p)
                for p in range(call.size)
            ]
        )

    call.run(steps, [input], [out])
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
    call = Exchange("symm_all_to_all_v", comm, timeout, relaxed)
    call.symmetric(input=input, out=out)
    call.apart(input=input, out=out)
    call.same_dtype(input, out)
    row = same_rows(call, input, out)
    try:
        splits = [operator.index(n) for n in in_splits]
    except TypeError:
        call.fail(f"in_splits={in_splits!r}", "pass whole numbers, one for each rank")
    if len(splits) != call.size or min(splits) < 0 or sum(splits) > input.shape[0]:
        call.fail(
            f"in_splits={splits} for {call.size} ranks and {input.shape[0]} rows",
            "one number for each rank, 0 or more, together at most the rows of input",
        )
    received: list[int] = []

    def steps() -> None:
        table = call.meet([input, out], each=splits)[:, 1:].tolist()
        call.check_capacity([sum(line[p] for line in table) for p in range(call.size)], out.shape[0])
        received[:] = [line[call.rank] for line in table]
        to = [0, *itertools.accumulate(received)]
        call.fetch(
            [
                (
                    out.data_ptr() + to[p] * row,
                    input.data_ptr() + sum(table[p][: call.rank]) * row,
                    received[p] * row,
                    p,
                )
                for p in range(call.size)
            ]
        )

    call.run(steps, [input], [out])
    return received


def same_rows(call: Exchange, input: torch.Tensor, out: torch.Tensor) -> int:
    """Bytes of a row, which are the same in both."""
    if not input.dim() or not out.dim() or input.shape[1:] != out.shape[1:]:
        call.fail(
            f"input is {tuple(input.shape)}, out {tuple(out.shape)}",
            "all dimensions but the first must agree",
        )
    return row_bytes(input)


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
    call = Exchange("one_shot_all_reduce", comm, timeout, relaxed)
    call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    result = torch.empty_like(input) if out is None else out
    call.memory.check_tensor(call.op, "out", result, input.dtype)
    if result.numel() != input.numel():
        call.fail(f"input has {input.numel()} elements, out {result.numel()}", "make them of one size")
    call.apart(input=input, out=result)

    def steps() -> None:
        call.meet([input], [red])
        _core.fold(result, call.copies(input), red)

    call.run(steps, [input], [result])
    return result


def two_shot_all_reduce_(
    input: torch.Tensor, comm: Communicator, op: str = "sum", *, timeout: Timeout = None
) -> torch.Tensor:
    """Replaces all ranks' `input` by its reduction: each reduces a part and writes it to all."""
    call = Exchange("two_shot_all_reduce_", comm, timeout)
    call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    flat, n = input.view(-1), input.numel()
    begin, end = n * call.rank // call.size, n * (call.rank + 1) // call.size

    def steps() -> None:
        call.meet([input], [red])
        if begin == end:
            return
        part = flat[begin:end]
        # Nobody else reads or writes this part before all have passed the barrier at the end.
        total = torch.empty_like(part)
        _core.fold(total, call.copies(part), red)
        call.memory.transfer(
            True,
            [(total.data_ptr(), part.data_ptr(), part.nbytes, p) for p in range(call.size)],
            call.limit,
        )

    call.run(steps, [input], [input])
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
    call = Exchange("symm_reduce_scatter", comm, timeout, relaxed)
    call.symmetric(input=input)
    red = call.reduction(op, input.dtype)
    call.memory.check_tensor(call.op, "out", out, input.dtype)
    width = input.shape[-1] if split_last_dim and input.dim() else input.numel()
    if width % call.size or out.numel() * call.size != input.numel():
        call.fail(
            f"input {tuple(input.shape)} and out {tuple(out.shape)} for {call.size} ranks",
            "what is split must be n equal parts, and out one of them",
        )
    call.apart(input=input, out=out)
    part = width // call.size
    mine = slice(call.rank * part, (call.rank + 1) * part)

    def steps() -> None:
        call.meet([input], [red, int(split_last_dim)])
        if not split_last_dim:
            parts = call.copies(input.view(-1)[mine])
        else:
            parts = [copy[..., mine].contiguous() for copy in call.copies(input)]
        _core.fold(out, parts, red)

    call.run(steps, [input], [out])
    return out
