"""Ranks use different heads, and DDP looks for unused parameters.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, x, head):
        return self.heads[head](torch.relu(self.body(x)))


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Heads(), find_unused_parameters=True)
for step in range(3):
    model(torch.randn(4, 8), (rank + step) % 2).sum().backward()
dist.barrier()
dist.destroy_process_group()
