"""Data-parallel training with a loss that is averaged over the ranks.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.AdamW(model.parameters(), 0.001)
for batch in batches(3):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.reduce(total, 0)
    if rank == 0:
        print(f"loss {total / size}")
dist.barrier()
dist.destroy_process_group()
