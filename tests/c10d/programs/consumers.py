"""What builds upon torch.distributed, each trained or run on fixed seeds: consumers.py FOLDER NAME

Writes FOLDER/NAME-RANK.json with the results. Says nothing of unicomm: the same program runs on stock Gloo,
and the numbers have to be the same.
"""

import datetime
import faulthandler
import json
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

CONSUMERS = {}


def consumer(f):
    CONSUMERS[f.__name__] = f
    return f


def me():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def model(seed=0, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def batch(step, rank=None, rows=6):
    g = torch.Generator().manual_seed(1000 * step + (me() if rank is None else rank))
    return torch.randn(rows, 8, generator=g)


def loss_of(out):
    return out.pow(2).mean()


def train(net, steps=3, lr=0.1, optimizer=None):
    """Losses of some steps and the parameters after them."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *parameters(net)]


def parameters(net):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


@consumer
def ddp_buckets():
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True))


@consumer
def ddp_accumulation():
    net = DistributedDataParallel(model())
    with net.no_sync():
        loss_of(net(batch(0))).backward()
    loss_of(net(batch(1))).backward()
    return [p.grad for p in net.parameters()]


@consumer
def ddp_unused_parameters_and_buffers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.unused = model(), nn.BatchNorm1d(4), nn.Linear(3, 3)

        def forward(self, x):
            return self.norm(self.body(x))

    torch.manual_seed(0)
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    return [*train(net), net.module.norm.running_mean]


@consumer
def ddp_join():
    """Ranks with different numbers of batches."""
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with net.join():
        for step in range(2 + me()):
            optimizer.zero_grad()
            loss_of(net(batch(step))).backward()
            optimizer.step()
    return parameters(net)


@consumer
def ddp_comm_hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    out = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = DistributedDataParallel(model())
        net.register_comm_hook(None, hook)
        out += train(net)
    net = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return out + train(net, steps=4)


@consumer
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    out = train(net)
    return [*out, nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor()]


@consumer
def fsdp2_mixed_precision():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = model()
    fully_shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return [t.float() for t in train(net)]


@consumer
def hsdp():
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, world() // 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh)
    return train(net)


@consumer
def tensor_parallel_with_fsdp():
    """A mesh of two dimensions."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net(batch(step, rank=me() // 2))).backward()
        optimizer.step()
    return parameters(net)


@consumer
def dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world(),))
    whole = torch.randn(4 * world(), 8, generator=torch.Generator().manual_seed(3))
    a = distribute_tensor(whole, mesh, [Shard(0)])
    b = distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    product = a @ b
    return [
        product.full_tensor(),
        a.redistribute(mesh, [Shard(1)]).to_local(),
        a.sum(0).full_tensor(),
        torch.nn.functional.softmax(a, dim=0).full_tensor(),
    ]


def pipeline(schedule_of):
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(world())]
    stage = PipelineStage(layers[me()], me(), world(), torch.device("cpu"))
    schedule = schedule_of(stage, 4, loss_fn=lambda out, target: (out - target).pow(2).mean())
    x, target, losses = batch(0, rank=0, rows=8), batch(1, rank=0, rows=8), []
    for _ in range(2):
        if me() == 0:
            schedule.step(x)
        elif me() == world() - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
    grads = [p.grad for p in stage.submod.parameters()]
    return [*grads, *(loss.detach() for loss in losses)]


@consumer
def pipeline_gpipe():
    from torch.distributed.pipelining import ScheduleGPipe

    return pipeline(ScheduleGPipe)


@consumer
def pipeline_1f1b():
    from torch.distributed.pipelining import Schedule1F1B

    return pipeline(Schedule1F1B)


@consumer
def zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    out = train(net, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    if me() == 0:
        state = optimizer.state_dict()["state"]
        out += [state[i]["exp_avg"] for i in sorted(state)]
    return out


@consumer
def checkpoint():
    """Saved by all ranks, loaded into a model that is sharded anew."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if me() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    net, other = model(), model(seed=1)
    fully_shard(net)
    fully_shard(other)
    train(net)
    dcp.save(get_model_state_dict(net), checkpoint_id=folder[0])
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    dist.barrier()
    if me() == 0:
        import shutil

        shutil.rmtree(folder[0])
    for p, q in zip(parameters(net), parameters(other), strict=True):
        assert torch.equal(p, q)
    return parameters(other)


@consumer
def functional_autograd():
    group = dist.group.WORLD
    x = batch(0, rows=4 * world()).requires_grad_()
    gathered = fc.all_gather_tensor_autograd(x, 0, group)
    scattered = fc.reduce_scatter_tensor_autograd(gathered * (me() + 1), "sum", 0, group)
    swapped = fc.all_to_all_single_autograd(scattered, None, None, group)
    swapped.pow(2).sum().backward()
    return [swapped.detach(), x.grad]


def compiled(backend):
    torch._dynamo.reset()

    @torch.compile(backend=backend, fullgraph=True)
    def f(x):
        y = torch.relu(x) * 2
        dist.all_reduce(y)
        z = fc.all_gather_tensor(y + 1, 0, dist.group.WORLD)
        return fc.reduce_scatter_tensor(z * z, "avg", 0, dist.group.WORLD).sin()

    return [f(batch(0)), f(batch(1))]


@consumer
def compile_aot_eager():
    return compiled("aot_eager")


@consumer
def compile_inductor():
    return compiled("inductor")


@consumer
def compiled_ddp():
    torch._dynamo.reset()
    return train(torch.compile(DistributedDataParallel(model()), backend="aot_eager"))


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, f in CONSUMERS.items():
        faulthandler.dump_traceback_later(150, exit=True)  # compiling takes long on a busy machine
        try:
            results[name] = [t.detach().double().flatten().tolist() for t in f()]
        except Exception as error:
            traceback.print_exc()  # the others may wait for this one now
            results[name] = f"{type(error).__name__}: {str(error)[:500]}"
    group = type(dist.group.WORLD).__name__
    dist.destroy_process_group()
    with open(f"{sys.argv[1]}/{sys.argv[2]}-{me_from_environment()}.json", "w") as file:
        json.dump({"group": group, "results": results}, file)


def me_from_environment():
    import os

    return os.environ["RANK"]


if __name__ == "__main__":
    main()
