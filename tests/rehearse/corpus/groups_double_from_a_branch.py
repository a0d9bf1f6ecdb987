"""Rank 0 sends in double precision what the others receive in single precision, from two lines.

kind: groups
verdict: dtype-mismatch
line: dist.broadcast(x.double(), 0)
culprits: 0
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.rand(4)
for _ in range(3):
    if rank == 0:
        dist.broadcast(x.double(), 0)
    else:
        dist.broadcast(x, 0)
    dist.all_reduce(x)
dist.destroy_process_group()
