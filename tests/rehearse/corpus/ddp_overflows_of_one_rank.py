"""One rank counts its overflows in integers before the gradients of all are reduced.

kind: DDP
verdict: wrong-operation
line: dist.all_reduce(overflows)
culprits: 5
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.rand(8)
for step in range(3):
    if rank == 5 and step == 1:
        overflows = torch.zeros(1, dtype=torch.int64)
        dist.all_reduce(overflows)
    dist.all_reduce(gradient)
dist.barrier()
dist.destroy_process_group()
