"""Groups of one, two and five ranks with different numbers of operations.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
lists = [[0], [1, 2], list(range(3, size))]
groups = [dist.new_group(ranks) for ranks in lists]
for ranks, group in zip(lists, groups, strict=True):
    if rank in ranks:
        for _ in range(len(ranks)):
            dist.all_reduce(torch.ones(len(ranks)), group=group)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
