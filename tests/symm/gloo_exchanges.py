"""Every composite beside the collectives of Gloo, on the same data, for threads and for processes."""

import numpy as np
import torch

from tests.symm.exchanges import FILL, plans, shared
from unicomm import ReduceOp, symm

WIDTH = 3


def check_against_gloo(comm, gloo, seed, aligns=(1, 8, 16, 128)):
    for experts in (1, 3):
        check_rows(comm, gloo, experts, aligns, seed)
    for dtype in (torch.float32, torch.int64):
        check_others(comm, gloo, dtype, seed)


def exchanged(gloo, rows, splits):
    """What `all_to_all_v_single` makes of them: rows by rank, and how many came from each."""
    splits = torch.as_tensor(splits)
    came = torch.empty_like(splits)
    gloo.all_to_all_single(came, splits, False)
    out = torch.empty(int(came.sum()), *rows.shape[1:], dtype=rows.dtype)
    gloo.all_to_all_v_single(
        out, rows[: int(splits.sum())].contiguous(), came.tolist(), splits.tolist(), False
    )
    return out, came


def check_rows(comm, gloo, experts, aligns, seed):
    """Dispatch, combine, and the exchanges by rank."""
    n, me = comm.get_size(), comm.get_rank()
    rng = np.random.default_rng(seed)  # the same numbers on all ranks
    k, most = n * experts, 40 * n * experts
    capacity = n * most + 128 * experts
    x = shared(comm, torch.randn(most, WIDTH, generator=torch.Generator().manual_seed(seed + me)))
    sent, back = (symm.empty(capacity, WIDTH, comm=comm) for _ in range(2))
    splits = symm.empty(k, dtype=torch.int64, comm=comm)
    there, again = (symm.empty(2, k, dtype=torch.int64, comm=comm) for _ in range(2))
    for i, plan in enumerate(plans(rng, n, experts)):
        mine = torch.from_numpy(plan[me].copy())
        splits.copy_(mine)
        # Gloo's exchange is by rank: each rank's rows come with the experts one after the other.
        wanted, _ = exchanged(gloo, x, mine.view(n, experts).sum(1))
        counts = torch.empty_like(mine)
        gloo.all_to_all_single(counts, mine, False)  # [from, expert]
        pieces = wanted.split(counts.tolist())
        align = aligns[i % len(aligns)]
        sent.fill_(FILL)
        symm.all_to_all_vdev_2d(x, sent, splits, there, comm, align)
        assert torch.equal(there[0].view(experts, n), counts.view(n, experts).T)
        covered = torch.zeros(capacity, dtype=torch.bool)
        for e in range(experts):
            starts = there[1].view(experts, n)[e]
            assert starts[0] % align == 0
            for p in range(n):
                piece, at = pieces[p * experts + e], int(starts[p])
                assert torch.equal(sent[at : at + len(piece)], piece)
                assert not covered[at : at + len(piece)].any()
                covered[at : at + len(piece)] = True
        assert (sent[~covered] == FILL).all()

        symm.all_to_all_vdev_2d_offset(sent, back, there, again, comm)
        returned, _ = exchanged(gloo, wanted, counts.view(n, experts).sum(1))
        assert torch.equal(back[: len(returned)], returned)
        assert torch.equal(again[0], mine)

        if experts == 1:
            symm.all_to_all_vdev(x, sent, splits, there, comm)
            assert torch.equal(sent[: len(wanted)], wanted)
            assert torch.equal(there[0], counts)
            back.fill_(FILL)
            assert symm.all_to_all_v(x, back, mine.tolist(), comm) == counts.tolist()
            assert torch.equal(back[: len(wanted)], wanted)
            assert (back[len(wanted) :] == FILL).all()
    for tensor in (x, sent, back, splits, there, again):
        symm.free(tensor, comm)


def check_others(comm, gloo, dtype, seed):
    """Whole numbers, so that the order of additions does not matter."""
    n, me = comm.get_size(), comm.get_rank()
    generator = torch.Generator().manual_seed(seed * 100 + me)
    values = torch.randint(-50, 50, (2 * n, 3 * n), generator=generator).to(dtype)
    x, out = shared(comm, values), shared(comm, torch.zeros_like(values))
    wanted = torch.empty_like(values)
    gloo.all_to_all_single(wanted, values, False)
    assert torch.equal(symm.all_to_all(x, out, comm), wanted)
    for name, op in (("sum", ReduceOp.SUM), ("max", ReduceOp.MAX), ("min", ReduceOp.MIN)):
        total = values.clone()
        gloo.all_reduce(total, op, False)
        assert torch.equal(symm.one_shot_all_reduce(x, comm, name), total)
        out.copy_(x)
        assert torch.equal(symm.two_shot_all_reduce_(out, comm, name), total)
        part, scattered = torch.empty(2, 3 * n, dtype=dtype), torch.empty(2, 3 * n, dtype=dtype)
        gloo.reduce_scatter_single(scattered, values, op, False)
        assert torch.equal(symm.reduce_scatter(x, part, comm, name), scattered)
        columns = torch.empty(2 * n, 3, dtype=dtype)
        symm.reduce_scatter(x, columns, comm, name, split_last_dim=True)
        assert torch.equal(columns, total[:, 3 * me : 3 * me + 3])
        for root in range(n):
            tile, mine = total[1:, root : root + 2], out[1:, root : root + 2]
            out.fill_(7)
            symm.tile_reduce(x[1:, root : root + 2], mine, root, comm, name)
            assert torch.equal(mine, tile if me == root else torch.full_like(tile, 7))
        out.fill_(7)
        roots = list(range(n))[::-1]
        symm.multi_root_tile_reduce(
            [x[:, 3 * i : 3 * i + 3] for i in range(n)], out[:, :3], roots, comm, name
        )
        assert torch.equal(out[:, :3], total[:, 3 * (n - 1 - me) : 3 * (n - me)])
        symm.reduce_scatter_offset(x, [columns], comm, dim=1, red_op=name)
        assert torch.equal(columns, total[:, 3 * me : 3 * me + 3])
    for root in range(n):
        x.copy_(values)
        copy = values.clone()
        gloo.broadcast(copy, root, False)
        assert torch.equal(symm.broadcast(x, root, comm), copy)
    symm.free(x, comm)
    symm.free(out, comm)
