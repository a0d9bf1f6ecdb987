"""The first stage sends an evaluation batch after the last step, which the second stage does not expect.

kind: pipeline
verdict: unmatched-send-or-recv
line: dist.send(x, rank + 1)  # evaluation
culprits: 0
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.rand(4)
for _ in range(3):
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < size - 1:
        dist.send(x, rank + 1)
if rank == 0:
    dist.send(x, rank + 1)  # evaluation
dist.barrier()
dist.destroy_process_group()
