"""The data of rank 4 has a broken sample, and its loader raises.

kind: DDP
verdict: exception
line: raise ValueError
culprits: 4
"""

import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel


def load(rank, step):
    if rank == 4 and step == 1:
        raise ValueError(f"sample {step} is broken")
    return next(batches(1))


dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
for step in range(3):
    model(load(dist.get_rank(), step)).sum().backward()
dist.destroy_process_group()
