"""Rank 2 of a halo exchange computes its left neighbour with a wrong sign.

kind: messages
verdict: unmatched-send-or-recv
line: dist.recv(halo, left)
culprits: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
left, right = rank - 1, rank + 1
if rank == 2:
    left = rank + 3
halo = torch.empty(16)
if rank < size - 1:
    sent = dist.isend(torch.ones(16), right)
if rank > 0:
    dist.recv(halo, left)
if rank < size - 1:
    sent.wait()
dist.destroy_process_group()
