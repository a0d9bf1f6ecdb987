"""Two messages with tags are sent and received in opposite orders by blocking calls.

kind: messages
verdict: wait-cycle-across-groups
line: dist.send(weights, 1, tag=1) | dist.recv(bias, 0, tag=2)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weights, bias = torch.ones(1024, 1024), torch.ones(1024)
if rank == 0:
    dist.send(weights, 1, tag=1)
    dist.send(bias, 1, tag=2)
elif rank == 1:
    dist.recv(bias, 0, tag=2)
    dist.recv(weights, 0, tag=1)
dist.destroy_process_group()
