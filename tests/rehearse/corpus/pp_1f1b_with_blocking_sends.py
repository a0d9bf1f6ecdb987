"""A hand-written 1F1B schedule with blocking calls: neighbours send to each other in the steady phase.

kind: pipeline
verdict: wait-cycle-across-groups
line: dist.send(torch.randn(4, 16), rank + 1) | dist.send(torch.randn(4, 16), rank - 1)
"""

import torch
import torch.distributed as dist

MICRO_BATCHES = 8
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def forward():
    if rank > 0:
        dist.recv(torch.empty(4, 16), rank - 1)
    if rank < size - 1:
        dist.send(torch.randn(4, 16), rank + 1)


def backward():
    if rank < size - 1:
        dist.recv(torch.empty(4, 16), rank + 1)
    if rank > 0:
        dist.send(torch.randn(4, 16), rank - 1)


warm_up = min(size - 1 - rank, MICRO_BATCHES)
for _ in range(warm_up):
    forward()
for _ in range(MICRO_BATCHES - warm_up):
    forward()
    backward()
for _ in range(warm_up):
    backward()
dist.destroy_process_group()
