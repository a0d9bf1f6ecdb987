"""What the ranks of the tests do with parts of matrices: every reduction of them against numpy."""

import numpy as np
import torch

from tests.symm.exchanges import FILL, host, shared
from unicomm import symm


def views(rng, rows, columns):
    """Views of a matrix of that size, in many steps."""
    top, left = sorted(rng.integers(0, rows, 2)), sorted(rng.integers(0, columns, 2))
    rows_of, columns_of = slice(top[0], top[1] + 1), slice(left[0], left[1] + 1)
    yield "whole", lambda m: m
    yield "part", lambda m: m[rows_of, columns_of]
    yield "turned", lambda m: m[rows_of, columns_of].T
    yield "steps", lambda m: m[::2, 1::3]
    yield "turned steps", lambda m: m[1::3, ::2].T
    yield "row", lambda m: m[2:3]
    yield "column", lambda m: m[:, 1:2]
    yield "nothing", lambda m: m[3:3]


def check_tiles(comm, dtype, seed, rows=9, columns=14):
    """tile_reduce, multi_root_tile_reduce and reduce_scatter_offset on many views."""
    n, me = comm.get_size(), comm.get_rank()
    rng = np.random.default_rng(seed)  # the same numbers on all ranks
    data = rng.integers(-4, 5, (n, rows, columns))
    values = torch.from_numpy(data).to(dtype)
    x, out = shared(comm, values[me]), shared(comm, torch.full((rows, columns), FILL).to(dtype))
    for name, fold in (("sum", np.sum), ("max", np.max), ("min", np.min)):
        for label, view in views(rng, rows, columns):
            root = int(rng.integers(n))
            out.fill_(FILL)
            wanted = np.full((rows, columns), FILL)
            if me == root:
                view(wanted)[...] = fold(np.stack([view(d) for d in data]), 0)
            symm.tile_reduce(view(x), view(out), root, comm, name)
            assert (host(out).double().numpy() == wanted).all(), (name, label, root)
    assert torch.equal(host(x), values[me])

    # Each root gets another column of tiles; one rank is no root.
    roots = rng.permutation(n)[: max(n - 1, 1)].tolist()
    tiles = [slice(i, i + 2) for i in range(len(roots))]
    out.fill_(FILL)
    wanted = np.full((rows, columns), FILL)
    if me in roots:
        wanted[:, :2] = data[:, :, tiles[roots.index(me)]].sum(0)
    symm.multi_root_tile_reduce([x[:, t] for t in tiles], out[:, :2], roots, comm)
    assert (host(out).double().numpy() == wanted).all()

    for dim in (0, 1):
        for _ in range(4):
            count = int(rng.integers(1, 2 * n + 2))
            ends = np.sort(rng.integers(0, data.shape[1 + dim] + 1, count))
            owners = rng.integers(0, n, count)
            check_offsets(comm, x[:, : columns - dim], data[:, :, : columns - dim], dim, ends, owners)
        size = data.shape[1 + dim] // n * n
        even = tuple(slice(size) if d == dim else slice(None) for d in (0, 1))
        ends = np.arange(1, n + 1) * (size // n)
        check_offsets(comm, x[even], data[(slice(None), *even)], dim, ends, np.arange(n), default=True)
    for tensor in (x, out):
        symm.free(tensor, comm)


def check_offsets(comm, x, data, dim, ends, owners, default=False):
    ends = np.minimum(ends, data.shape[1 + dim])
    blocks = [data.take(range(a, b), 1 + dim).sum(0) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    own = [block for block, owner in zip(blocks, owners, strict=True) if owner == comm.get_rank()]
    outs = [torch.full(block.shape, FILL).to(x) for block in own]
    chosen = {} if default else {"offsets": ends.tolist(), "dst_ranks": owners.tolist()}
    symm.reduce_scatter_offset(x, outs, comm, dim=dim, **chosen)
    for got, wanted in zip(outs, own, strict=True):
        assert (host(got).double().numpy() == wanted).all()
