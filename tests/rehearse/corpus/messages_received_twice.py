"""Rank 3 receives its halo twice in one step.

kind: messages
verdict: unmatched-send-or-recv
line: dist.recv(halo, left)  # again
culprits: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size
halo, edge = torch.zeros(4), torch.rand(4)
for step in range(4):
    work = dist.isend(edge, right)
    dist.recv(halo, left)
    work.wait()
    if rank == 3 and step == 1:
        dist.recv(halo, left)  # again
dist.destroy_process_group()
