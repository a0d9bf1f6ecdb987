"""Each rank skips the step if its own gradients are infinite, and with it the sum of the optimizer.

kind: DDP
verdict: wrong-operation | never-joined
line: dist.all_reduce(scale) | dist.all_reduce(loss)
culprits: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(4):
    gradient = torch.rand(4) + (float("inf") if rank == 4 and step == 1 else 0)
    if torch.isfinite(gradient).all():
        scale = gradient.norm().reshape(1)
        dist.all_reduce(scale)
    loss = torch.rand(1)
    dist.all_reduce(loss)
dist.destroy_process_group()
