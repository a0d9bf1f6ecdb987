"""Stage 2 was given another hidden size, and sends activations that stage 3 does not expect.

kind: pipeline
verdict: p2p-size-mismatch
line: dist.send(activation, rank + 1) | dist.recv(activation, rank - 1)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
hidden = {2: 24}.get(rank, 16)
activation = torch.empty(4, 16)
for _ in range(2):
    if rank > 0:
        dist.recv(activation, rank - 1)
    if rank < size - 1:
        activation = torch.randn(4, hidden)
        dist.send(activation, rank + 1)
    activation = torch.empty(4, 16)
dist.destroy_process_group()
