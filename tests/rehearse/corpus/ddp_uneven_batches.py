"""The data set does not divide evenly, so the last rank has one batch fewer than the others.

kind: DDP
verdict: wrong-operation
line: dist.barrier()
culprits: last
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
samples = 12 * size - 1
mine = len(range(rank, samples, size))
for batch in batches(mine // 4 if rank < size - 1 else (mine - 1) // 4):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
