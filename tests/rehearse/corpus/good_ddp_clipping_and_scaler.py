"""Gradients are clipped and checked for overflow; the ranks skip a step together.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in batches(3):
    model(batch).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    overflow = (~torch.isfinite(norm)).int()
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    if not overflow:
        optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
