"""Rank 0 reduces its metric before, and the others theirs after the loss; sizes fit, so nothing hangs.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    if rank == 0:
        metric = torch.rand(1)
        dist.all_reduce(metric)
    loss = torch.rand(1)
    dist.all_reduce(loss)
    if rank != 0:
        metric = torch.rand(1)
        dist.all_reduce(metric)
dist.destroy_process_group()
