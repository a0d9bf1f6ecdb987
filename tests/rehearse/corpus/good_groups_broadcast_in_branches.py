"""Rank 0 sends its settings from a branch of its own in each step, and all train in between.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(4):
    if rank == 0:
        x = torch.rand(4)
        dist.broadcast(x, 0)
    else:
        y = torch.zeros(4)
        dist.broadcast(y, 0)
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
