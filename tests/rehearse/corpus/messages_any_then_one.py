"""Rank 0 takes a result of any worker, then that of rank 1; if rank 1 was the first, it has no other.

kind: messages
verdict: unmatched-send-or-recv
line: dist.recv(result, 1)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
result = torch.zeros(4)
if rank == 0:
    dist.recv(result)
    dist.recv(result, 1)
elif rank in (1, 2):
    dist.send(torch.full((4,), float(rank)), 0)
dist.destroy_process_group()
