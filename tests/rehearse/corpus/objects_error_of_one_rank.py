"""Only ranks with an error report it to all.

kind: objects
verdict: wrong-operation
line: dist.all_gather_object(errors, str(error))
culprits: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(3):
    try:
        if rank == 2 and step == 1:
            raise ValueError("bad")
    except ValueError as error:
        errors = [None] * size
        dist.all_gather_object(errors, str(error))
    dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
