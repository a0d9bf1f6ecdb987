"""Layers are dropped at random, with the same seed on all ranks.

kind: FSDP2
verdict: all-good
"""

import random

import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
random.seed(7)
torch.manual_seed(dist.get_rank())
blocks = nn.ModuleList([Block() for _ in range(4)])
for block in blocks:
    fully_shard(block)
for _ in range(2):
    x = torch.randn(4, 16, requires_grad=True)
    for block in blocks:
        if random.random() > 0.3:
            x = block(x)
    x.sum().backward()
dist.destroy_process_group()
