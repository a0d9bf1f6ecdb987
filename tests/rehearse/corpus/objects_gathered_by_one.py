"""Rank 0 alone gathers the names of the hosts.

kind: objects
verdict: wrong-operation
line: dist.all_gather_object(names, "host")
culprits: 0
"""

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
if rank == 0:
    names = [None] * size
    dist.all_gather_object(names, "host")
dist.barrier()
dist.destroy_process_group()
