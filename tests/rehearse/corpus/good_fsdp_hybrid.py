"""Parameters are sharded within a node and replicated over the nodes.

kind: FSDP2
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
for batch in batches(2):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
