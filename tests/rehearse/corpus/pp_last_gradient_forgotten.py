"""The last stage sends a gradient for all micro-batches but the last.

kind: pipeline
verdict: unmatched-send-or-recv
line: dist.recv(gradient, rank + 1)
culprits: last
"""

import torch
import torch.distributed as dist

MICRO_BATCHES = 4
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
activation, gradient = torch.randn(2, 16), torch.empty(2, 16)
for _ in range(MICRO_BATCHES):
    if rank > 0:
        dist.recv(activation, rank - 1)
    if rank < size - 1:
        dist.send(activation, rank + 1)
for number in range(MICRO_BATCHES):
    if rank < size - 1:
        dist.recv(gradient, rank + 1)
    if rank == size - 1 and number == MICRO_BATCHES - 1:
        break
    if rank > 0:
        dist.send(gradient, rank - 1)
dist.destroy_process_group()
