"""Data parallel training in which the last rank has one batch fewer than the others."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches = 3 - (rank == size - 1)
for _ in range(batches):
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()  # the gradients are reduced here
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
