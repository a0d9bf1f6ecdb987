"""A server takes the results of its workers as they come.

kind: messages
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
result = torch.zeros(4)
if rank == 0:
    for _ in range(3):
        dist.recv(result)
elif rank <= 3:
    dist.send(torch.full((4,), float(rank)), 0)
dist.barrier()
dist.destroy_process_group()
