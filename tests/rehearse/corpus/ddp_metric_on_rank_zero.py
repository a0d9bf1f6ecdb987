"""Only rank 0 reduces the loss for its log.

kind: DDP
verdict: wrong-operation
line: dist.reduce(total, 0)
culprits: 0
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in batches(3):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        total = loss.detach().clone()
        dist.reduce(total, 0)
        print(f"loss {total / dist.get_world_size()}")
dist.destroy_process_group()
