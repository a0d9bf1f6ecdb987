"""Rank 0 prepares the data while the others wait in a barrier of another line.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank != 0:
    dist.barrier()
data = torch.rand(8)
if rank == 0:
    dist.barrier()
dist.all_reduce(data)
dist.destroy_process_group()
