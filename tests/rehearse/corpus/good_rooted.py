"""Reductions, gathers and scatters with several roots.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for root in (0, size - 1):
    x = torch.ones(4)
    dist.reduce(x, root)
    parts = [torch.empty(4) for _ in range(size)] if rank == root else None
    dist.gather(x, parts, root)
    mine = torch.empty(4)
    dist.scatter(mine, parts, root)
    dist.broadcast(mine, root)
dist.monitored_barrier()
dist.destroy_process_group()
