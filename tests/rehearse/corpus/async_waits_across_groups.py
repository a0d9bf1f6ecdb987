"""Each rank waits for one group before it issues the other, and rank 1 takes them in the other order.

kind: async
verdict: wait-cycle-across-groups
line: first.wait() | first = dist.all_reduce
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
a, b = dist.new_group(list(range(size))), dist.new_group(list(range(size)))
order = [a, b] if rank != 1 else [b, a]
first = dist.all_reduce(torch.ones(4), group=order[0], async_op=True)
first.wait()
second = dist.all_reduce(torch.ones(4), group=order[1], async_op=True)
second.wait()
dist.destroy_process_group()
