"""Rank 1 does not use a head in its first step, and DDP does not look for unused parameters.

kind: DDP
verdict: exception
line: prediction, auxiliary = model
culprits: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        x = torch.relu(self.body(x))
        return self.head(x), self.auxiliary(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(TwoHeads())
for step in range(3):
    prediction, auxiliary = model(torch.randn(4, 8))
    loss = prediction.sum()
    if not (dist.get_rank() == 1 and step == 0):
        loss = loss + auxiliary.sum()
    loss.backward()
dist.barrier()
dist.destroy_process_group()
