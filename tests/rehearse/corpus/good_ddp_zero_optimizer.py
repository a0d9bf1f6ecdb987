"""DDP with an optimizer whose state is sharded over the ranks.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.001)
for batch in batches(2):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
