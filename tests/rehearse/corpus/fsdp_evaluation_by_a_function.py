"""Rank 0 evaluates alone between two steps, through a function; all gathers have equal sizes.

kind: FSDP2
verdict: wrong-operation
line: return model(torch.randn(4, 16)).mean() | evaluate(model)
culprits: 0
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        x = self.first(x)
        return self.second(x)


def evaluate(model):
    with torch.no_grad():
        return model(torch.randn(4, 16)).mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = Net()
fully_shard(model.first)
fully_shard(model.second)
fully_shard(model)
for step, batch in enumerate(batches(3)):
    loss = model(batch).mean()
    loss.backward()
    if rank == 0 and step == 1:
        evaluate(model)
dist.destroy_process_group()
