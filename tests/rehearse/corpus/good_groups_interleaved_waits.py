"""Asynchronous operations of two groups, issued in one order and waited for in another.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
a, b = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
for _ in range(2):
    first = dist.all_reduce(torch.ones(4), group=a, async_op=True)
    second = dist.all_reduce(torch.ones(4), group=b, async_op=True)
    for work in (second, first) if rank % 2 else (first, second):
        work.wait()
dist.destroy_process_group()
