"""Rank 6 finds its disk full and exits, while the others go on.

kind: DDP
verdict: exited
line: sys.exit(3)
culprits: 6
"""

import sys

import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
free = 0 if dist.get_rank() == 6 else 1 << 30
for batch in batches(2):
    model(batch).sum().backward()
    if free < 1 << 20:
        sys.exit(3)
dist.destroy_process_group()
