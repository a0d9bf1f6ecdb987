"""Early stopping that all ranks decide by the same averaged loss.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
best = float("inf")
for epoch in range(3):
    for batch in batches(2):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    validation = torch.tensor(1.0 / (epoch + 1))
    dist.all_reduce(validation, dist.ReduceOp.AVG)
    if validation > best:
        break
    best = validation.item()
dist.destroy_process_group()
