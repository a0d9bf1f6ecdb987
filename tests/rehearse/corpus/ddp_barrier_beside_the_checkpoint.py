"""Rank 0 saves a checkpoint, and the barrier behind it stands in the same branch.

kind: DDP
verdict: never-joined
line: dist.barrier()
culprits: others
"""

import io

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
for batch in batches(2):
    model(batch).sum().backward()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), io.BytesIO())
    dist.barrier()
