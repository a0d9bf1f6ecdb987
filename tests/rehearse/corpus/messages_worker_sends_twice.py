"""A server receives one result of each worker, but worker 3 sends its result again.

kind: messages
verdict: unmatched-send-or-recv
line: dist.send(result, 0)  # again
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
result = torch.ones(4)
if rank == 0:
    for worker in range(1, size):
        dist.recv(result, worker)
else:
    dist.send(result, 0)
    if rank == 3:
        dist.send(result, 0)  # again
dist.destroy_process_group()
