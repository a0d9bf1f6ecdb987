"""A 3-D program in which one data-parallel replica does not average its loss over the tensor-parallel ranks.

kind: 3-D
verdict: wrong-operation | size-mismatch | never-joined
line: dist.all_reduce(loss, group=tensor)
culprits: 1
"""

import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=("replica", "shard", "tensor"))
tensor = mesh["tensor"].get_group()
model = nn.Sequential(Block(), Block())
for block in model:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replica", "shard"])
for step in range(2):
    torch.manual_seed(step)
    loss = model(torch.randn(2, 16)).square().mean()
    loss.backward()
    loss = loss.detach()
    if step == 0 or rank != 1:
        dist.all_reduce(loss, group=tensor)
dist.destroy_process_group()
