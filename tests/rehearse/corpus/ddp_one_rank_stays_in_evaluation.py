"""Rank 1 does not go back from evaluation to training, so a layer that averages statistics leaves that out.

kind: DDP
verdict: wrong-operation
line: loss.backward() | output = model(batch)
culprits: 1
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Stats(nn.Module):
    def forward(self, x):
        if self.training:
            total = x.mean(0)
            dist.all_reduce(total)
            x = x - total / size
        return x


model = nn.Sequential(nn.Linear(8, 8), Stats(), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(model)
for step in range(3):
    if step == 1:
        model.eval()
        if rank != 1:
            model.train()
    batch = torch.randn(4, 8)
    output = model(batch)
    loss = output.mean()
    loss.backward()
dist.barrier()
dist.destroy_process_group()
