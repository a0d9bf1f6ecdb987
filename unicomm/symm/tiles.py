"""Reductions of parts of matrices in symmetric memory: who owns a part reads all ranks' copies of it.

`comm` is the communicator, or the team, whose ranks take part. `reduce_op` is "sum", "product", "min" or
"max". `relaxed=True` leaves out the barrier at the end. `timeout` is in seconds, by default the
communicator's.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from unicomm.comms.communicator import Communicator

from .exchange import Exchange, spans_meet

Timeout = timedelta | float | None


def tile_reduce(
    in_tile: torch.Tensor,
    out_tile: torch.Tensor,
    root: int,
    comm: Communicator,
    reduce_op: str = "sum",
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """The root's `out_tile` becomes the reduction of all ranks' `in_tile`; other ranks' stays as it is.

    Both are 2-D views of symmetric tensors with the same dtype, sizes and strides, which may be any.
    `reduce_op` is "sum", "product", "min" or "max"; torch has "sum" only, and of floats.
    """
    call = Exchange("tile_reduce", comm, timeout, relaxed)
    *tiles, out_tile = _tiles(call, {"in_tile": in_tile}, out_tile)
    _reduce(call, tiles, [call.root("root", root)], [out_tile], reduce_op)


def multi_root_tile_reduce(
    in_tiles: Sequence[torch.Tensor],
    out_tile: torch.Tensor,
    roots: Sequence[int],
    comm: Communicator,
    reduce_op: str = "sum",
    *,
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """`out_tile` of rank `roots[i]` becomes the reduction of all ranks' `in_tiles[i]`.

    A rank is root at most once; one that is none takes part, and its `out_tile` stays as it is. Otherwise as
    `tile_reduce`.
    """
    call = Exchange("multi_root_tile_reduce", comm, timeout, relaxed)
    tiles = list(in_tiles)
    if not tiles or len(tiles) != len(roots):
        call.fail(
            f"{len(tiles)} in_tiles for {len(roots)} roots", "pass one root for each tile, and one tile"
        )
    owners = [call.root(f"roots[{i}]", root) for i, root in enumerate(roots)]
    if len(set(owners)) < len(owners):
        call.fail(f"roots={owners} has a rank twice", "a rank has one out_tile: pass each once")
    *tiles, out_tile = _tiles(call, {f"in_tiles[{i}]": tile for i, tile in enumerate(tiles)}, out_tile)
    _reduce(call, tiles, owners, [out_tile], reduce_op)


def reduce_scatter_offset(
    input: torch.Tensor,
    out: Sequence[torch.Tensor],
    comm: Communicator,
    *,
    dim: int,
    offsets: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    red_op: str = "sum",
    relaxed: bool = False,
    timeout: Timeout = None,
) -> None:
    """Cuts all ranks' matrices into blocks, and reduces each block on the rank to which it belongs.

    Args:
        input: a 2-D symmetric tensor, whose rows may have gaps between them.
        out: this rank's blocks in their order: contiguous tensors of the blocks' shapes, anywhere.
        dim: 0 cuts between rows, 1 between columns.
        offsets: where each block ends; the first begins at 0. n equal blocks by default.
        dst_ranks: the rank of each block; `i % n` by default. A rank may have several, or none.
        red_op: "sum", "product", "min" or "max"; torch has "sum" only.
    """
    call = Exchange("reduce_scatter_offset", comm, timeout, relaxed)
    (input,) = call.symmetric(strided=True, input=input)
    if input.dim() != 2 or (input.shape[1] > 1 and input.stride(1) != 1) or _overlaps_itself(input):
        call.fail(
            f"input has shape {tuple(input.shape)} and strides {input.stride()}",
            "a matrix whose rows are contiguous",
        )
    if dim not in (0, 1):
        call.fail(f"dim={dim!r}", "0 cuts between rows, 1 between columns")
    ends = _ends(call, input.shape[dim], offsets)
    owners = [i % call.size for i in range(len(ends))]
    if dst_ranks is not None:
        owners = [call.root(f"dst_ranks[{i}]", rank) for i, rank in enumerate(dst_ranks)]
    if len(owners) != len(ends):
        call.fail(f"{len(owners)} dst_ranks for {len(ends)} blocks", "pass one rank for each block")
    blocks = [input.narrow(dim, begin, end - begin) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    own = [block for block, owner in zip(blocks, owners, strict=True) if owner == call.rank]
    outs = list(out)
    if len(outs) != len(own):
        call.fail(f"{len(outs)} outs for {len(own)} blocks of this rank", "pass one tensor for each")
    named = {
        f"out[{i}]": call.memory.check_tensor(call.op, f"out[{i}]", tensor, input.dtype)
        for i, tensor in enumerate(outs)
    }
    for (name, tensor), block in zip(named.items(), own, strict=True):
        if tensor.shape != block.shape:
            call.fail(f"{name} is {tuple(tensor.shape)}", f"its block is {tuple(block.shape)}")
    call.apart(input=input, **named)
    _reduce(call, blocks, owners, list(named.values()), red_op, input)


def _ends(call: Exchange, size: int, offsets: Sequence[int] | None) -> list[int]:
    if offsets is None:
        if size % call.size:
            call.fail(
                f"{size} rows or columns for {call.size} ranks", "pass offsets=: they are no equal blocks"
            )
        return [size // call.size * (i + 1) for i in range(call.size)]
    try:
        ends = [operator.index(end) for end in offsets]
    except TypeError:
        call.fail(f"offsets={offsets!r}", "pass whole numbers: where each block ends")
    if not ends or ends[0] < 0 or ends[-1] > size or any(a > b for a, b in itertools.pairwise(ends)):
        call.fail(
            f"offsets={ends} of {size} rows or columns", "where each block ends, in order, within input"
        )
    return ends


def _tiles(call: Exchange, ins: dict[str, Any], out: Any) -> list[torch.Tensor]:
    """All of them, the last one `out`, when they fit together."""
    tiles = dict(zip([*ins, "out_tile"], call.symmetric(strided=True, **ins, out_tile=out), strict=True))
    first_name, first = next(iter(tiles.items()))
    for name, tile in tiles.items():
        if tile.dim() != 2:
            call.fail(f"{name} has {tile.dim()} dimensions", "pass a view with two, as tensor[a:b, c:d]")
        if (tile.dtype, tile.shape, tile.stride()) != (first.dtype, first.shape, first.stride()):
            call.fail(
                f"{name} is {tuple(tile.shape)} of {tile.dtype} with strides {tile.stride()}, {first_name}"
                f" {tuple(first.shape)} of {first.dtype} with {first.stride()}",
                "all tiles must have the same sizes, strides and dtype",
            )
    out = tiles.pop("out_tile")
    if _overlaps_itself(out):
        call.fail(f"out_tile's elements overlap (strides {out.stride()})", "pass a view without overlaps")
    for name, tile in tiles.items():
        if _share_elements(tile, out):
            call.fail(f"{name} and out_tile share memory, which other ranks read", "pass separate tiles")
    return [*tiles.values(), out]


def _overlaps_itself(tile: torch.Tensor) -> bool:
    (rows, columns), (row_step, column_step) = tile.shape, tile.stride()
    if rows < 2 or columns < 2:
        return (rows > 1 and row_step == 0) or (columns > 1 and column_step == 0)
    fine, coarse = sorted([(column_step, columns), (row_step, rows)])
    return fine[0] == 0 or coarse[0] < fine[0] * fine[1]


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of tiles with the same sizes and strides, which may lie between each other's lines."""
    if not a.numel() or not spans_meet(a, b):
        return False
    distance, odd = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if odd:
        return True
    (rows, columns), (row_step, column_step) = a.shape, a.stride()
    rest = distance - np.arange(-rows + 1, rows) * row_step
    step = max(column_step, 1)
    return bool(((rest % step == 0) & (np.abs(rest // step) < columns)).any())


def _reduce(
    call: Exchange,
    ins: Sequence[torch.Tensor],
    owners: Sequence[int],
    outs: Sequence[torch.Tensor],
    op: str,
    whole: torch.Tensor | None = None,
) -> None:
    red = call.reduction(op, ins[0].dtype)
    own = outs if call.rank in owners else []
    call.run(
        lambda head: call.domain.reduce_tiles(head, _described(ins), list(owners), _described(own)),
        list(ins) if whole is None else [whole],
        own,
        red=red,
    )


def _described(tiles: Sequence[torch.Tensor]) -> list[tuple[int, int, int, int, int]]:
    return [(tile.data_ptr(), *tile.shape, *tile.stride()) for tile in tiles]
