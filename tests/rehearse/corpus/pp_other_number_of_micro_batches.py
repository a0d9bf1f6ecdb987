"""The first half of the stages splits the batch into four, the second half into three micro-batches.

kind: pipeline
verdict: unmatched-send-or-recv
line: dist.send(activation, rank + 1)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
batch = torch.randn(12, 16)
micro_batches = batch.chunk(4 if rank < size // 2 else 3)
activation = torch.empty(3, 16)
for _ in micro_batches:
    if rank > 0:
        dist.recv(activation, rank - 1)
    if rank < size - 1:
        dist.send(activation, rank + 1)
dist.destroy_process_group()
