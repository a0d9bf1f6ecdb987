"""Two models are wrapped in the order of a dictionary that one rank has filled in another order; DDP refuses.

kind: DDP
verdict: exception
line: wrapped[name] = DistributedDataParallel
culprits: last
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
names = ["generator", "discriminator"]
if rank == size - 1:  # it has read its models from a cache
    names.reverse()
sizes = {"generator": (8, 64), "discriminator": (64, 1)}
wrapped = {}
for name in names:
    wrapped[name] = DistributedDataParallel(nn.Linear(*sizes[name]))
fake = wrapped["generator"](torch.randn(4, 8))
wrapped["discriminator"](fake).sum().backward()
dist.destroy_process_group()
