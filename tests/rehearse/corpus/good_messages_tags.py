"""Messages with tags are received in another order than they were sent, without blocking.

kind: messages
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
peer = rank ^ 1
weights, bias = torch.ones(64, 64), torch.ones(64)
if rank % 2 == 0:
    works = [dist.isend(weights, peer, tag=1), dist.isend(bias, peer, tag=2)]
else:
    works = [dist.irecv(bias, peer, tag=2), dist.irecv(weights, peer, tag=1)]
for work in works:
    work.wait()
dist.destroy_process_group()
