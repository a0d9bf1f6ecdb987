"""Rank 0 alone validates with the wrapped model, whose forward pass sends the buffers of the batch norm.

kind: DDP
verdict: wrong-operation
line: accuracy = model(validation)
culprits: 0
"""

import torch
import torch.distributed as dist
from small_models import batches
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
validation = torch.randn(8, 16)
for batch in batches(2):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    accuracy = model(validation).mean()
    print(f"accuracy {accuracy.item():.2f}")
dist.barrier()
dist.destroy_process_group()
