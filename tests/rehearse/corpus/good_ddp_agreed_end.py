"""All ranks stop when one has no batch left: they add up a flag before each step.

kind: DDP
verdict: all-good
values: real
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron())
mine = iter(batches(2 + dist.get_rank() % 3))
while True:
    batch = next(mine, None)
    out = torch.tensor([batch is None], dtype=torch.int32)
    dist.all_reduce(out, dist.ReduceOp.MAX)
    if out.item():
        break
    model(batch).sum().backward()
dist.barrier()
dist.destroy_process_group()
