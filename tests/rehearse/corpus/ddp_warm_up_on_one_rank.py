"""Rank 2 runs a step more to warm up its profiler, with DDP's reduction.

kind: DDP
verdict: wrong-operation | never-joined
line: loss.backward()  # warm-up
culprits: 2
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if rank == 2:
    loss = model(torch.randn(4, 16)).mean()
    loss.backward()  # warm-up
    optimizer.zero_grad()
for batch in batches(3):
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
