"""Fully sharded training, with a clipped norm and a logged loss.

kind: FSDP2
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(Block(), Block(), Block())
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.001, foreach=False)
for batch in batches(2):
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
dist.destroy_process_group()
