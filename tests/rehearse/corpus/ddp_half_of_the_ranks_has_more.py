"""The first half of the ranks has a batch more than the second half, so there is no majority.

kind: DDP
verdict: wrong-operation | never-joined
line: loss.backward() | dist.all_reduce(accuracy)
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(perceptron())
for batch in batches(4 if rank < size // 2 else 3):
    loss = model(batch).mean()
    loss.backward()
accuracy = torch.zeros(1)
dist.all_reduce(accuracy)
dist.destroy_process_group()
