"""Parameters are averaged every second step instead of gradients in each.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

dist.init_process_group("gloo")
model = perceptron()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
averager = PeriodicModelAverager(period=2, warmup_steps=1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in batches(4):
    model(batch).sum().backward()
    optimizer.step()
    averager.average_parameters(model.parameters())
    optimizer.zero_grad()
dist.destroy_process_group()
