"""Rank 0 evaluates the sharded model alone, whose forward pass gathers the parameters.

kind: FSDP2
verdict: wrong-operation
line: score = model(held_out)
culprits: 0
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.001, foreach=False)
held_out = torch.randn(8, 16)
for batch in batches(2):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    with torch.no_grad():
        score = model(held_out).mean()
dist.barrier()
dist.destroy_process_group()
