"""Ring attention: blocks travel around the ring by batches of a send and a receive.

kind: messages
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
query, block = torch.randn(8, 16), torch.randn(8, 16)
total = torch.zeros(8, 8)
for step in range(size):
    works = []
    if step < size - 1:
        following = torch.empty_like(block)
        sent, taken = P2POp(isend, block, (rank + 1) % size), P2POp(irecv, following, (rank - 1) % size)
        works = batch_isend_irecv([sent, taken])
    total += query @ block.t()
    for work in works:
        work.wait()
    block = following
dist.destroy_process_group()
