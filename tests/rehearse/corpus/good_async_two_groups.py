"""Asynchronous operations of two groups, waited for in another order on odd ranks.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
other = dist.new_group(range(size))
for _ in range(3):
    a = dist.all_reduce(torch.ones(4), async_op=True)
    b = dist.all_gather_into_tensor(torch.zeros(4 * size), torch.ones(4), group=other, async_op=True)
    for work in (b, a) if rank % 2 else (a, b):
        work.wait()
dist.barrier()
dist.destroy_process_group()
