"""Rank 1 forgets to pass its group, so it reduces over all ranks.

kind: groups
verdict: wait-cycle-across-groups | never-joined | wrong-operation
line: dist.all_reduce(x)
culprits: 1
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
x = torch.ones(8)
if rank == 1:
    dist.all_reduce(x)
else:
    dist.all_reduce(x, group=pairs[rank // 2])
dist.barrier()
dist.destroy_process_group()
