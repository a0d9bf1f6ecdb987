"""Groups of all kinds: nested, overlapping, subgroups, and one made by its members only.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
half, others = dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))
mine, _ = dist.new_subgroups(2)
ends = dist.new_group([0, size - 1])
x = torch.ones(4)
dist.all_reduce(x, group=half if rank < size // 2 else others)
dist.all_reduce(x, group=mine)
if rank in (0, size - 1):
    dist.all_reduce(x, group=ends)
if rank % 2 == 0:
    even = dist.new_group(list(range(0, size, 2)), use_local_synchronization=True)
    dist.all_gather([torch.empty(4) for _ in range(size // 2)], x, group=even)
dist.barrier()
dist.destroy_process_group()
