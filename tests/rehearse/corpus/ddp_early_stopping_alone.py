"""Each rank decides by its own validation loss when to stop, and rank 2 stops first.

kind: DDP
verdict: wrong-operation
line: dist.all_reduce(best)
culprits: 2
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.AdamW(model.parameters(), 0.001)
validation_losses = [1.0, 0.8, 0.9, 0.7] if rank == 2 else [1.0, 0.8, 0.7, 0.6]
best = torch.tensor(float("inf"))
for epoch in range(4):
    for batch in batches(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if validation_losses[epoch] > best:
        break
    best = torch.tensor(validation_losses[epoch])
dist.all_reduce(best)
dist.destroy_process_group()
