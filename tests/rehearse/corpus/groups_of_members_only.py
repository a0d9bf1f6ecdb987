"""Only the members of a group call new_group, which torch does not allow.

kind: groups
verdict: membership-disagreement
line: first = dist.new_group(
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank < 4:
    first = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(torch.ones(2), group=first)
dist.barrier()
dist.destroy_process_group()
