"""Rank 0 of a hybrid-sharded model evaluates alone after its first step.

kind: FSDP2
verdict: wrong-operation
line: score = model(held_out)
culprits: 0
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
held_out = torch.randn(8, 16)
for step, batch in enumerate(batches(3)):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and dist.get_rank() == 0:
        with torch.no_grad():
            score = model(held_out).mean()
dist.barrier()
dist.destroy_process_group()
