"""Only the members of a group call new_group, and pass use_local_synchronization.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank < 4:
    first = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=first)
dist.barrier()
dist.destroy_process_group()
