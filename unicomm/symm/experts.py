"""All-to-all whose splits are in symmetric memory too: the exchange of a mixture of experts.

Units are rows of the first dimension. Splits and offsets are int64: row 0 of a `splits_offsets` tensor has
the splits, row 1 the offsets. n ranks have e experts each, of which there may be any number; k = rank * e +
expert is rank-major, k = expert * n + rank expert-major. Rows of `out` between and behind the blocks stay as
they are. `InvalidArgumentError` on all ranks, and nothing written, when one rank's `out` is too small.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray

from unicomm.comms.communicator import Communicator

from .collectives import same_rows
from .exchange import Exchange

Timeout = timedelta | float | None
Numbers = NDArray[np.int64]


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
    call = Exchange("all_to_all_vdev", comm, timeout, relaxed)
    row = _check(call, input, out, in_splits, out_splits_offsets)
    if in_splits.numel() != call.size:
        call.fail(f"in_splits has {in_splits.numel()} numbers", f"one for each of the {call.size} ranks")
    _dispatch(call, row, input, out, in_splits, out_splits_offsets, None)


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
    call = Exchange("all_to_all_vdev_2d", comm, timeout, relaxed)
    row = _check(call, input, out, in_splits, out_splits_offsets)
    align = 1 if major_align is None else major_align
    if not isinstance(align, int) or align < 1:
        call.fail(f"major_align={major_align!r}", "a whole number of rows, 1 or more")
    _dispatch(call, row, input, out, in_splits, out_splits_offsets, align)


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
    call = Exchange("all_to_all_vdev_2d_offset", comm, timeout, relaxed)
    row = _check(call, input, out, in_splits_offsets, out_splits_offsets)

    def steps() -> None:
        call.meet([input, out, in_splits_offsets, out_splits_offsets])
        everyone = _numbers(call.gather(in_splits_offsets)).reshape(call.size, 2, -1, call.size)
        sent, begins = everyone[:, 0], everyone[:, 1]  # [from, expert, to]
        call.check_capacity(sent.sum((0, 1)).tolist(), out.shape[0])
        came, source = sent[:, :, call.rank], begins[:, :, call.rank]  # [from, expert]
        starts = _before(came.reshape(-1)).reshape(came.shape)
        _finish(call, row, input, out, out_splits_offsets, came, starts, source, came.shape)

    call.run(steps, [input], [out, out_splits_offsets])


def _dispatch(
    call: Exchange,
    row: int,
    input: torch.Tensor,
    out: torch.Tensor,
    in_splits: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    align: int | None,
) -> None:
    """`align` None: blocks by rank without gaps, which are those of one expert a rank."""

    def steps() -> None:
        call.meet([input, out, in_splits, out_splits_offsets], [align or 0])
        splits = _numbers(call.gather(in_splits)).reshape(call.size, call.size, -1)  # [from, to, expert]
        blocks = splits.sum(0)  # [to, expert]
        if align is not None:
            blocks = np.maximum(-(-blocks // align), 1) * align
        filled = splits.sum(0)  # padding is not written
        ends = np.where(filled > 0, _before(blocks, axis=1) + filled, 0)
        call.check_capacity(ends.max(1).tolist(), out.shape[0])
        came = splits[:, call.rank].T  # [expert, from]
        starts = _before(blocks[call.rank])[:, None] + np.cumsum(came, 1) - came
        before = _before(splits.reshape(call.size, -1), axis=1).reshape(splits.shape)
        source = before[:, call.rank].T
        _finish(call, row, input, out, out_splits_offsets, came, starts, source, came.shape)

    call.run(steps, [input], [out, out_splits_offsets])


def _finish(
    call: Exchange,
    row: int,
    input: torch.Tensor,
    out: torch.Tensor,
    out_splits_offsets: torch.Tensor,
    came: Numbers,
    starts: Numbers,
    source: Numbers,
    shape: tuple[int, ...],
) -> None:
    """Writes splits and offsets, and fetches the rows. Ranks are along axis 0 in combine, else along 1."""
    numbers = _numbers(out_splits_offsets).reshape(2, -1)
    numbers[0], numbers[1] = came.reshape(-1), starts.reshape(-1)
    ranks = np.arange(call.size)
    peers = ranks[:, None] if call.op == "all_to_all_vdev_2d_offset" else ranks[None, :]
    peers = np.broadcast_to(peers, shape)
    to, at = out.data_ptr(), input.data_ptr()
    some = np.argwhere(came > 0)
    call.fetch(
        [
            (
                to + int(starts[i, j]) * row,
                at + int(source[i, j]) * row,
                int(came[i, j]) * row,
                int(peers[i, j]),
            )
            for i, j in some
        ]
    )


def _check(
    call: Exchange, input: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, results: torch.Tensor
) -> int:
    """Bytes of a row. `splits` are what this rank sends: [k], or [2, k] with offsets."""
    call.symmetric(input=input, out=out)
    name = "in_splits_offsets" if call.op.endswith("offset") else "in_splits"
    for what, tensor in ((name, splits), ("out_splits_offsets", results)):
        call.memory.check_symmetric(call.op, what, tensor, torch.int64)
    call.apart(input=input, out=out, splits=splits, out_splits_offsets=results)
    call.same_dtype(input, out)
    row = same_rows(call, input, out)
    numbers = _numbers(splits).reshape(2, -1) if name == "in_splits_offsets" and splits.dim() == 2 else None
    given = _numbers(splits).reshape(-1) if numbers is None else numbers[0]
    if name == "in_splits_offsets" and (numbers is None or splits.shape[0] != 2):
        call.fail(f"{name} is {tuple(splits.shape)}", "pass [2, e * n]: splits and offsets")
    if given.size % call.size:
        call.fail(f"{name} has {given.size} splits", f"a multiple of the {call.size} ranks")
    if tuple(results.shape) != (2, given.size):
        call.fail(f"out_splits_offsets is {tuple(results.shape)}", f"make it (2, {given.size})")
    begins = _before(given) if numbers is None else numbers[1]
    ends = np.where(given > 0, begins + given, 0)  # the offset of nothing may be anywhere
    if given.min() < 0 or begins.min() < 0 or int(ends.max()) > input.shape[0]:
        call.fail(
            f"{name} goes beyond the {input.shape[0]} rows of input, or is negative",
            "look at how it was computed",
        )
    return row


def _numbers(tensor: torch.Tensor) -> Numbers:
    return tensor.numpy()


def _before(numbers: Numbers, axis: int = 0) -> Numbers:
    """The sum of all numbers before each."""
    return np.cumsum(numbers, axis) - numbers
