"""Rank 1 counts its micro-batches from 1, so it leaves `no_sync` in other steps than the others.

kind: DDP
verdict: wrong-operation
line: dist.barrier()
culprits: 1
"""

import contextlib

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
first = 1 if rank == 1 else 0
for number, batch in enumerate(batches(3), first):
    last = number % 2 == 0
    with contextlib.nullcontext() if last else model.no_sync():
        model(batch).sum().backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
