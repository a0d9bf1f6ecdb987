"""What torch.distributed offers, feature by feature, on whatever stands behind it. One line of JSON a rank.

Says nothing of unicomm: the same program runs on stock Gloo.
"""

import datetime
import faulthandler
import inspect
import json
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn

faulthandler.dump_traceback_later(100, exit=True)
FEATURES = {}
# torch 2.11 has them by their earlier names.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def feature(f):
    FEATURES[f.__name__] = f
    return f


def me():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def ramp(n=4):
    return torch.arange(n, dtype=torch.float32) + me()


def everyone(n=4):
    return [torch.arange(n, dtype=torch.float32) + r for r in range(world())]


def equal(a, b):
    assert torch.equal(a, b), (a, b)


@feature
def all_reduce():
    x = ramp()
    assert dist.all_reduce(x) is None
    equal(x, sum(everyone()))


@feature
def all_reduce_async():
    x = ramp()
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert work.is_completed()
    equal(x, everyone()[-1])


@feature
def get_future():
    x = ramp()
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    equal(future.wait(), sum(everyone()) * 2)


@feature
def reduce_ops():
    for op, expected in ((dist.ReduceOp.AVG, sum(everyone()) / world()), (dist.ReduceOp.MIN, everyone()[0])):
        x = ramp()
        dist.all_reduce(x, op=op)
        equal(x, expected)


@feature
def bool_and_complex():
    x = torch.tensor([True, me() == 0])
    dist.broadcast(x, world() - 1)
    equal(x, torch.tensor([True, world() == 1]))
    z = torch.complex(ramp(), ramp())
    dist.all_reduce(z)
    equal(z, torch.complex(sum(everyone()), sum(everyone())))


@feature
def broadcast():
    x = ramp()
    dist.broadcast(x, 1)
    equal(x, everyone()[1])


@feature
def reduce():
    x = ramp()
    dist.reduce(x, 0)
    if me() == 0:
        equal(x, sum(everyone()))


@feature
def all_gather():
    out = [torch.empty(4) for _ in range(world())]
    dist.all_gather(out, ramp())
    for a, b in zip(out, everyone(), strict=True):
        equal(a, b)


@feature
def all_gather_into_tensor():
    out = torch.empty(4 * world())
    all_gather_single(out, ramp())
    equal(out, torch.cat(everyone()))


@feature
def reduce_scatter():
    out = torch.empty(4)
    dist.reduce_scatter(out, [ramp() * (r + 1) for r in range(world())])
    equal(out, sum(everyone()) * (me() + 1))


@feature
def reduce_scatter_tensor():
    out = torch.empty(4)
    reduce_scatter_single(out, torch.cat([ramp() * (r + 1) for r in range(world())]))
    equal(out, sum(everyone()) * (me() + 1))


@feature
def all_to_all_single():
    out = torch.empty(world())
    dist.all_to_all_single(out, torch.arange(world(), dtype=torch.float32) + 10 * me())
    equal(out, torch.arange(world(), dtype=torch.float32) * 10 + me())


@feature
def all_to_all_single_splits():
    send, receive = [r + 1 for r in range(world())], [me() + 1] * world()
    out = torch.empty(sum(receive))
    dist.all_to_all_single(out, torch.full((sum(send),), float(me())), receive, send)
    equal(out, torch.arange(world(), dtype=torch.float32).repeat_interleave(me() + 1))


@feature
def gather():
    out = [torch.empty(4) for _ in range(world())] if me() == 0 else None
    dist.gather(ramp(), out, 0)
    for a, b in zip(out or [], everyone(), strict=False):
        equal(a, b)


@feature
def scatter():
    out = torch.empty(4)
    dist.scatter(out, [torch.full((4,), float(r)) for r in range(world())] if me() == 0 else None, 0)
    equal(out, torch.full((4,), float(me())))


@feature
def barrier():
    dist.barrier()
    dist.barrier(async_op=True).wait()


@feature
def monitored_barrier():
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))


@feature
def send_recv():
    right, left = (me() + 1) % world(), (me() - 1) % world()
    out = torch.empty(4)
    if me() % 2 == 0:
        dist.send(ramp(), right)
        dist.recv(out, left)
    else:
        dist.recv(out, left)
        dist.send(ramp(), right)
    equal(out, everyone()[left])


@feature
def isend_irecv():
    right, left = (me() + 1) % world(), (me() - 1) % world()
    out = torch.empty(4)
    works = [dist.isend(ramp(), right), dist.irecv(out, left)]
    for work in works:
        work.wait()
    equal(out, everyone()[left])


@feature
def batch_isend_irecv():
    """Large enough that no transport holds it: everyone sends before anyone receives."""
    right, left = (me() + 1) % world(), (me() - 1) % world()
    n = 3_000_000
    out = torch.empty(n)
    ops = [
        dist.P2POp(dist.isend, torch.full((n,), float(me())), right),
        dist.P2POp(dist.irecv, out, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert bool((out == left).all())


@feature
def recv_from_any():
    if me() == 0:
        seen = set()
        for _ in range(world() - 1):
            out = torch.empty(1)
            source = dist.recv(out)
            assert source == int(out)
            seen.add(source)
        assert seen == set(range(1, world()))
    else:
        dist.send(torch.tensor([float(me())]), 0)


@feature
def objects():
    got = [None] * world()
    dist.all_gather_object(got, {"rank": me()})
    assert got == [{"rank": r} for r in range(world())]
    shared = [("a", 1)] if me() == 0 else [None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [("a", 1)]
    out = [None]
    dist.scatter_object_list(out, list(range(world())) if me() == 0 else None, 0)
    assert out == [me()]
    gathered = [None] * world() if me() == 0 else None
    dist.gather_object(me(), gathered, 0)
    assert gathered in (None, list(range(world())))


@feature
def coalescing():
    xs = [ramp(), ramp(3), ramp(1)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    for x, n in zip(xs, (4, 3, 1), strict=True):
        equal(x, sum(everyone(n)))
    outs = [torch.empty(4 * world()), torch.empty(2 * world())]
    with dist._coalescing_manager():
        all_gather_single(outs[0], ramp())
        all_gather_single(outs[1], ramp(2))
    equal(outs[0], torch.cat(everyone()))
    equal(outs[1], torch.cat(everyone(2)))


@feature
def new_group_without_the_others():
    """Only members call it, in another order than the ranks'."""
    ranks = [1, 0]
    if me() in ranks:
        group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False)
        assert dist.get_group_rank(group, me()) == ranks.index(me())
        x = ramp()
        dist.broadcast(x, 1, group=group)
        equal(x, everyone()[1])


@feature
def new_group_of_some_then_of_all():
    some = dist.new_group([0])
    if me() == 0:
        dist.all_reduce(torch.ones(1), group=some)
    whole = dist.new_group()
    x = ramp()
    dist.all_reduce(x, group=whole)
    equal(x, sum(everyone()))
    dist.destroy_process_group(whole)


@feature
def new_subgroups():
    mine, _ = dist.new_subgroups(1)
    x = ramp()
    dist.all_reduce(x, group=mine)
    equal(x, ramp())


@feature
def split_group():
    ranks = list(range(world()))
    group = dist.split_group(split_ranks=[ranks])
    x = ramp()
    dist.all_reduce(x, group=group)
    equal(x, sum(everyone()))


@feature
def wait_with_timeout():
    work = dist.barrier(async_op=True)
    work.wait(datetime.timedelta(seconds=20))


@feature
def functional_all_reduce():
    equal(fc.wait_tensor(fc.all_reduce(ramp(), "sum", dist.group.WORLD)), sum(everyone()))


@feature
def functional_all_gather():
    equal(fc.wait_tensor(fc.all_gather_tensor(ramp(), 0, dist.group.WORLD)), torch.cat(everyone()))


@feature
def functional_broadcast():
    equal(fc.wait_tensor(fc.broadcast(ramp(), 1, dist.group.WORLD)), everyone()[1])


@feature
def functional_reduce_scatter():
    big = torch.cat([ramp()] * world())
    equal(fc.wait_tensor(fc.reduce_scatter_tensor(big, "sum", 0, dist.group.WORLD)), sum(everyone()))


@feature
def functional_all_to_all():
    big = torch.cat([ramp()] * world())
    equal(fc.wait_tensor(fc.all_to_all_single(big, None, None, dist.group.WORLD)), torch.cat(everyone()))


@feature
def functional_coalesced():
    outs = fc.all_reduce_coalesced([ramp(), ramp(2)], "sum", dist.group.WORLD)
    equal(fc.wait_tensor(outs[1]), sum(everyone(2)))


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@feature
def ddp():
    """The gradients are those of one process with everyone's data."""
    from torch.nn.parallel import DistributedDataParallel

    alone, model = small_model(), DistributedDataParallel(small_model(), bucket_cap_mb=0.001)
    inputs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(r)) for r in range(world())]
    with model.no_sync():
        model(inputs[me()]).pow(2).mean().backward()
    model(inputs[me()]).pow(2).mean().backward()
    for x in inputs:
        (alone(x).pow(2).mean() * 2 / world()).backward()
    for p, q in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@feature
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    alone, model = small_model(), small_model()
    fully_shard(model)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    model(x).pow(2).mean().backward()
    alone(x).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(alone.parameters(), 1e9))
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@feature
def device_mesh():
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, world()), mesh_dim_names=("a", "b"))
    x = ramp()
    dist.all_reduce(x, group=mesh["b"].get_group())
    equal(x, sum(everyone()))


@feature
def dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (world(),))
    whole = torch.arange(8.0 * world()).reshape(2 * world(), 4)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    equal(parts.full_tensor(), whole)
    equal(parts.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)
    torch.testing.assert_close(parts.sum().full_tensor(), whole.sum())


@feature
def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (world(),))
    alone, model = small_model(), small_model()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), alone(x))


@feature
def compiled_functional():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        return x + fc.all_reduce(x, "sum", dist.group.WORLD)

    torch.testing.assert_close(f(ramp()), sum(everyone()) + ramp())


@feature
def compiled_dist_all_reduce():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    torch.testing.assert_close(f(ramp()), sum(everyone()) * 2 + 1)


@feature
def zero_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    alone, model = small_model(), small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for m, optimizer in ((model, sharded), (alone, plain)):
        m(torch.ones(2, 8)).pow(2).mean().backward()
        optimizer.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def main():
    backend = next((a for a in sys.argv[1:] if not a.startswith("-")), "gloo")
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    results = {}
    # Last, for torch 2.14 counts it as a group of its members only, and names all later ones differently from
    # rank to rank: then no backend can make them. 2.11 so names this one, and has an option less.
    last = "new_group_without_the_others"
    features = {n: f for n, f in FEATURES.items() if n != last}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        features[last] = FEATURES[last]
    for name, f in features.items():
        try:
            f()
            results[name] = "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {str(error)[:300]}"
            if "--trace" in sys.argv:
                traceback.print_exc()
        faulthandler.dump_traceback_later(60, exit=True)
    dist.barrier()  # some may still be at what the others have no part in
    group = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
    dist.init_process_group(backend)  # again, in one process
    x = ramp()
    dist.all_reduce(x)
    results["again"] = "ok" if torch.equal(x, sum(everyone())) else str(x)
    dist.destroy_process_group()
    print(json.dumps({"group": group, "results": results}), flush=True)


if __name__ == "__main__":
    main()
