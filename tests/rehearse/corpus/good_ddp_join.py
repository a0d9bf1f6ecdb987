"""Ranks with different numbers of batches, in DDP's context manager for uneven inputs.

kind: DDP
verdict: all-good
values: real
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with Join([model]):
    for batch in batches(2 + dist.get_rank() % 2):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
