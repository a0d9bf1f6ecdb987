"""Rank 0 alone validates, with the module inside of DDP, and the others wait at a barrier.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
for batch in batches(2):
    model(batch).sum().backward()
    if dist.get_rank() == 0:
        with torch.no_grad():
            print("validation", model.module.eval()(torch.randn(8, 16)).mean().item())
        model.module.train()
    dist.barrier()
dist.destroy_process_group()
