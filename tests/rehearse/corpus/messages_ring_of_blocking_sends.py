"""All ranks of a ring send to the right before they receive from the left.

kind: messages
verdict: wait-cycle-across-groups
line: dist.send(block, right)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % size, (rank + 1) % size
block, received = torch.randn(1024, 1024), torch.empty(1024, 1024)
for _ in range(size - 1):
    dist.send(block, right)
    dist.recv(received, left)
    block = received.clone()
dist.destroy_process_group()
