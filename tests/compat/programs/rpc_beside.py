"""torch.distributed.rpc beside a process group: remote calls and references, distributed autograd, DDP."""

import os

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

from tests.compat.programs.result import report


# The other rank may call them as soon as RPC is there, so they come first.
def linear():
    """Weights without random numbers, whose order is not fixed between RPC's threads and the program's."""
    module = torch.nn.Linear(4, 1)
    for values in module.parameters():
        torch.nn.init.constant_(values, 0.25)
    return module


def call(reference, x):
    return reference.local_value()(x)


def parameters(reference):
    return [rpc.RRef(p) for p in reference.local_value().parameters()]


rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
other = f"worker{1 - rank}"
losses = [rpc.rpc_sync(other, torch.add, (torch.ones(2), 1)).sum()]
torch.manual_seed(rank)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
dist.barrier()  # linear() draws random numbers too
table = rpc.remote(other, linear)
remote_parameters = rpc.rpc_sync(other, parameters, (table,))
optimizer = DistributedOptimizer(torch.optim.SGD, remote_parameters, lr=0.05)
dist.barrier()
for step in range(3):
    torch.manual_seed(100 + 10 * step + rank)
    x = torch.randn(8, 8)
    with dist_autograd.context() as context:
        middle = ddp(x)
        loss = (rpc.rpc_sync(other, call, (table, middle)) - x.sum(1, keepdim=True)).pow(2).mean()
        dist_autograd.backward(context, [loss])
        optimizer.step(context)
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total)
report(losses, ddp.module.state_dict())
rpc.shutdown()
dist.destroy_process_group()
