"""The replicas are computed from a list of hosts in which one rank is missing on half of the ranks.

kind: groups
verdict: membership-disagreement
line: replica = dist.new_group
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
healthy = list(range(size))
if rank < 2:
    healthy.remove(size - 1)
replica = dist.new_group(healthy)
dist.all_reduce(torch.ones(8), group=replica)
dist.destroy_process_group()
