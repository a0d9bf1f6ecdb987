"""Ranks with less data repeat their last batch, in a branch of their own.

kind: FSDP2
verdict: all-good
"""

import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block)
fully_shard(model)
for batch in batches(3 if rank else 2):
    loss = model(batch).mean()
    loss.backward()
if rank == 0:
    dummy = model(batch).mean() * 0
    dummy.backward()
dist.barrier()
dist.destroy_process_group()
