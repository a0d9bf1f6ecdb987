"""A server answers whichever worker is first, until it has received the last message of each.

kind: messages
verdict: all-good
values: real
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
weights = torch.zeros(4)
if rank == 0:
    working = size - 1
    while working:
        gradients = torch.empty(4)
        worker = dist.recv(gradients)
        if gradients.isnan().all():
            working -= 1
            continue
        weights -= 0.1 * gradients
        dist.send(weights, worker)
else:
    for _ in range(1 + rank % 3):
        dist.send(weights - 1, 0)
        dist.recv(weights, 0)
    dist.send(torch.full((4,), torch.nan), 0)
dist.barrier()
dist.destroy_process_group()
