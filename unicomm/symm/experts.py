"""All-to-all whose splits are in symmetric memory too: the exchange of a mixture of experts.

Units are rows of the first dimension. Splits and offsets are int64: row 0 of a `splits_offsets` tensor has
the splits, row 1 the offsets. n ranks have e experts each, of which there may be any number; k = rank * e +
expert is rank-major, k = expert * n + rank expert-major. Rows of `out` between and behind the blocks stay as
they are. `InvalidArgumentError` on all ranks, and nothing written, when one rank's `out` is too small.

Rows of `input` are sent. `comm` is the communicator, or the team, whose ranks take part. `relaxed=True`
leaves out the barrier at the end. `timeout` is in seconds, by default the communicator's.
"""

from __future__ import annotations

from datetime import timedelta

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.operations.table import OPERATIONS

from .exchange import Exchange, fast_of

Timeout = timedelta | float | None
_MOST_ALIGN = 1 << 31


def all_to_all_vdev(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    comm: Communicator,
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """Sends `in_splits[p]` rows to rank p; `out` gets the ranks' blocks one after the other.

    Fills `out_splits_offsets` [2, n] with the rows that came from each rank, and where they begin. All
    tensors are symmetric.
    """
    _dispatch("all_to_all_vdev", input, out, in_splits, out_splits_offsets, comm, None, relaxed, timeout)


def all_to_all_vdev_2d(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    comm: Communicator,
    major_align: int | None = None,
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """Dispatch: `in_splits[p * e + x]` rows go to expert x of rank p; `out` is sorted by expert.

    Fills `out_splits_offsets` [2, n * e], expert-major: the rows of expert x from rank p, and where they
    begin. Each expert's block begins at a multiple of `major_align` (1 by default) and takes at least so many
    rows, also when it is empty.
    """
    align = 1 if major_align is None else major_align
    _dispatch("all_to_all_vdev_2d", input, out, in_splits, out_splits_offsets, comm, align, relaxed, timeout)


def all_to_all_vdev_2d_offset(
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits_offsets: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    comm: Communicator,
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """Combine: rows of each expert, at given offsets, go back to their ranks; `out` is sorted by rank.

    `in_splits_offsets` [2, e * n] is expert-major, as dispatch fills it. `out_splits_offsets` [2, n * e]
    becomes rank-major: the rows from expert x of rank p and where they begin, without gaps. After a dispatch
    that is the order which its `input` had.
    """
    op = "all_to_all_vdev_2d_offset"
    done = fast_of(comm).combine(
        OPERATIONS[op].code, input, out, in_splits_offsets, out_splits_offsets, relaxed, timeout
    )
    if done is True:
        return
    call = Exchange(op, comm, timeout, relaxed)
    if done is not False:
        call.fast_failed(done, "in_splits_offsets", input, out)
    input, out, in_splits_offsets, out_splits_offsets = _check(
        call, input, out, in_splits_offsets, out_splits_offsets, "in_splits_offsets"
    )
    if in_splits_offsets.dim() != 2 or in_splits_offsets.shape[0] != 2:
        call.fail(f"in_splits_offsets is {tuple(in_splits_offsets.shape)}", "[2, e * n]: splits and offsets")
    _check_counts(call, "in_splits_offsets", in_splits_offsets.shape[1], out_splits_offsets)
    call.run_rows(
        lambda head: call.domain.combine(head, input, out, in_splits_offsets, out_splits_offsets),
        "in_splits_offsets",
        input,
        [out, out_splits_offsets],
    )


def _dispatch(
    op: str,
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    comm: Communicator,
    align: int | None,
    relaxed: bool,
    timeout: Timeout,
) -> None:
    done = fast_of(comm).dispatch(
        OPERATIONS[op].code, input, out, in_splits, out_splits_offsets, align, relaxed, timeout
    )
    if done is True:
        return
    call = Exchange(op, comm, timeout, relaxed)
    if done is not False:
        call.fast_failed(done, "in_splits", input, out)
    input, out, in_splits, out_splits_offsets = _check(
        call, input, out, in_splits, out_splits_offsets, "in_splits"
    )
    if align is None and in_splits.numel() != call.size:
        call.fail(f"in_splits has {in_splits.numel()} numbers", f"one for each of the {call.size} ranks")
    whole = isinstance(align, int) and not isinstance(align, bool)
    if align is not None and not (whole and 1 <= align <= _MOST_ALIGN):
        call.fail(f"major_align={align!r}", f"a whole number of rows, from 1 to {_MOST_ALIGN}")
    _check_counts(call, "in_splits", in_splits.numel(), out_splits_offsets)
    call.run_rows(
        lambda head: call.domain.dispatch(head, input, out, in_splits, out_splits_offsets, align or 0),
        "in_splits",
        input,
        [out, out_splits_offsets],
    )


def _check(
    call: Exchange,
    input: torch.Tensor,
    out: torch.Tensor,
    splits: torch.Tensor,
    results: torch.Tensor,
    name: str,
) -> list[torch.Tensor]:
    """What can be seen without the numbers, at which all ranks look together when they have met.

    Returns the four tensors, or those on arrays' memory.
    """
    input, out = call.symmetric(input=input, out=out)
    splits, results = (
        call.memory.check_symmetric(call.op, what, tensor, torch.int64)
        for what, tensor in ((name, splits), ("out_splits_offsets", results))
    )
    call.apart(input=input, out=out, splits=splits, out_splits_offsets=results)
    call.same_dtype(input, out)
    call.same_rows(input, out)
    return [input, out, splits, results]


def _check_counts(call: Exchange, name: str, count: int, results: torch.Tensor) -> None:
    if count % call.size:
        call.fail(f"{name} has {count} splits", f"a multiple of the {call.size} ranks")
    if tuple(results.shape) != (2, count):
        call.fail(f"out_splits_offsets is {tuple(results.shape)}", f"make it (2, {count})")
