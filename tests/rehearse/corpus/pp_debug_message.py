"""The second stage sends its activations once more for a debug output that the third stage does not know.

kind: pipeline
verdict: unmatched-send-or-recv
line: dist.send(x, rank + 1)  # debug
culprits: 1
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.rand(4)
for step in range(4):
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < size - 1:
        dist.send(x, rank + 1)
    if rank == 1 and step == 1:
        dist.send(x, rank + 1)  # debug
dist.barrier()
dist.destroy_process_group()
