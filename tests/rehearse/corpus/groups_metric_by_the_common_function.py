"""Rank 0 averages a metric by the helper that all ranks use for the loss.

kind: groups
verdict: wrong-operation | never-joined
line: log(mean(torch.rand(1)))
culprits: 0
"""

import torch
import torch.distributed as dist


def mean(value):
    dist.all_reduce(value)
    return value / dist.get_world_size()


def log(value):
    print(float(value.sum()))


dist.init_process_group("gloo")
for step in range(4):
    loss = torch.rand(1)
    loss = mean(loss)
    if step == 1 and dist.get_rank() == 0:
        log(mean(torch.rand(1)))
total = torch.zeros(16)
dist.all_reduce(total)
dist.destroy_process_group()
