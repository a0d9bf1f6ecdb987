"""Functional collectives inside of a compiled function.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

dist.init_process_group("gloo")


@torch.compile(backend="aot_eager")
def step(x):
    total = collectives.all_reduce(x * 2, "sum", dist.group.WORLD)
    return collectives.all_gather_tensor(total + 1, 0, dist.group.WORLD)


for _ in range(2):
    step(torch.ones(4))
dist.destroy_process_group()
