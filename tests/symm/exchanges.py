"""What the ranks of the tests do: every composite against numpy, the same for threads and for processes."""

import numpy as np
import torch

from tests.symm.reference import combine, dispatch
from unicomm import symm

FILL = -7.0


def shared(comm, values):
    """A symmetric tensor with these values on this rank; all ranks have theirs when it returns."""
    values = torch.as_tensor(values)
    tensor = symm.empty(values.shape, dtype=values.dtype, comm=comm)
    tensor.copy_(values)
    comm.barrier(False)  # nobody puts something there before
    return tensor


def host(tensor):
    """What a tensor has, wherever it is: what was put on the stream before is there."""
    return tensor.cpu()


def plans(rng, n, experts):
    """Splits [from, to * experts] of many kinds."""
    k = n * experts
    yield rng.integers(0, 6, (n, k))
    yield np.zeros((n, k), np.int64)
    one_empty = rng.integers(1, 5, (n, k))
    one_empty[:, rng.integers(k)] = 0
    yield one_empty
    to_one = np.zeros((n, n, experts), np.int64)
    to_one[:, rng.integers(n)] = rng.integers(0, 9, (n, experts))
    yield to_one.reshape(n, k)
    one_sends = np.zeros((n, k), np.int64)
    one_sends[rng.integers(n)] = rng.integers(0, 9, k)
    yield one_sends
    yield rng.integers(0, 40, (n, k)) * (rng.random((n, k)) < 0.3)


def check_experts(comm, experts, aligns, seed, width=3, dtype=torch.float32):
    """Dispatch, and combine of what it made, for all plans."""
    n, me = comm.get_size(), comm.get_rank()
    rng = np.random.default_rng(seed)  # the same numbers on all ranks
    k = n * experts
    most = 40 * k
    capacity = most * n + 128 * experts
    x = symm.empty(most, width, dtype=dtype, comm=comm)
    sent = symm.empty(capacity, width, dtype=dtype, comm=comm)
    back = symm.empty(capacity, width, dtype=dtype, comm=comm)
    splits = symm.empty(k, dtype=torch.int64, comm=comm)
    there, again = (symm.empty(2, k, dtype=torch.int64, comm=comm) for _ in range(2))
    for align in aligns:
        for plan in plans(rng, n, experts):
            data = rng.integers(-100, 100, (n, most, width)).astype(np.float32)
            outs = np.full((n, capacity, width), FILL, np.float32)
            x.copy_(torch.from_numpy(data[me]))
            splits.copy_(torch.from_numpy(plan[me]))
            sent.fill_(FILL)
            wanted = dispatch(data, plan.tolist(), outs, align)
            symm.all_to_all_vdev_2d(x, sent, splits, there, comm, align)
            assert (host(there).numpy() == wanted[me]).all(), (align, plan, there, wanted[me])
            assert (host(sent).float().numpy() == outs[me]).all(), (align, plan)
            returned = np.full((n, capacity, width), FILL, np.float32)
            wanted_back = combine(outs, wanted, returned)
            back.fill_(FILL)
            symm.all_to_all_vdev_2d_offset(sent, back, there, again, comm)
            assert (host(again).numpy() == wanted_back[me]).all()
            assert (host(back).float().numpy() == returned[me]).all()
            # And that is what there was at first.
            total = int(plan[me].sum())
            assert torch.equal(back[:total], x[:total])
            assert again[0].tolist() == plan[me].tolist()
            if experts == 1 and align == aligns[0]:
                flat = np.full((n, capacity, width), FILL, np.float32)
                dense = dispatch(data, plan.tolist(), flat, None)
                sent.fill_(FILL)
                symm.all_to_all_vdev(x, sent, splits, there, comm, relaxed=True)
                assert (host(there).numpy() == dense[me]).all()
                assert (host(sent).float().numpy() == flat[me]).all()
                # `relaxed`: the others may not have read x yet, which the next round changes.
                comm.barrier(False)
    for tensor in (x, sent, back, splits, there, again):
        symm.free(tensor, comm)


def check_collectives(comm, dtype, shape, seed):
    """All others, with the numbers of all ranks known to all."""
    n, me = comm.get_size(), comm.get_rank()
    rng = np.random.default_rng(seed)
    data = torch.from_numpy(rng.integers(-3, 4, (n, n, *shape))).to(dtype)
    x, out = shared(comm, data[me]), shared(comm, torch.zeros_like(data[me]))
    assert torch.equal(host(symm.all_to_all(x, out, comm)), data[:, me])
    for name, fold in (
        ("sum", lambda d: d.sum(0)),
        ("max", lambda d: d.amax(0)),
        ("min", lambda d: d.amin(0)),
    ):
        wanted = fold(data.double()).to(dtype)
        assert torch.equal(host(symm.one_shot_all_reduce(x, comm, name)), wanted)
        out.copy_(x)
        assert symm.two_shot_all_reduce_(out, comm, name) is out
        assert torch.equal(host(out), wanted)
        part = torch.empty(shape, dtype=dtype, device=comm.get_device())
        assert torch.equal(host(symm.reduce_scatter(x, part, comm, name)), wanted[me])
    columns = data.transpose(1, -1).contiguous()  # the n parts last
    y = shared(comm, columns[me])
    piece = torch.empty((*columns.shape[1:-1], 1), dtype=dtype, device=comm.get_device())
    symm.reduce_scatter(y, piece, comm, split_last_dim=True)
    assert torch.equal(host(piece), columns.double().sum(0).to(dtype)[..., me : me + 1])
    for root in range(n):
        x.copy_(data[me])
        assert torch.equal(host(symm.broadcast(x, root, comm)), data[root])
    for plan in plans(rng, n, 1):
        rows = torch.from_numpy(rng.integers(-9, 9, (n, 300, 2)))
        z = shared(comm, rows[me])
        got = shared(comm, torch.full((300 * n, 2), -99))
        came = symm.all_to_all_v(z, got, plan[me].tolist(), comm)
        assert came == plan[:, me].tolist()
        parts = [rows[p, plan[p, :me].sum() : plan[p, : me + 1].sum()] for p in range(n)]
        assert torch.equal(host(got)[: sum(came)], torch.cat(parts))
        assert (got[sum(came) :] == -99).all()
        symm.free(z, comm)
        symm.free(got, comm)
    for tensor in (x, out, y):
        symm.free(tensor, comm)
