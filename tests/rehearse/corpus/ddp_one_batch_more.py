"""Rank 0 takes the remainder of the data set and trains on one batch more.

kind: DDP
verdict: never-joined
line: loss.backward()
culprits: others
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
optimizer = torch.optim.SGD(model.parameters(), 0.01)
count = 3 if dist.get_rank() == 0 else 2
for batch in batches(count):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
