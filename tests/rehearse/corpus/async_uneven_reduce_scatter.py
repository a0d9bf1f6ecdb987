"""The padding of the last shard is forgotten on one rank, so it scatters a shorter gradient.

kind: async
verdict: size-mismatch
line: work = dist.reduce_scatter_tensor
culprits: last
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
rows = 8 if rank < size - 1 else 7
gradient, shard = torch.ones(size * rows), torch.empty(rows)
work = dist.reduce_scatter_tensor(shard, gradient, async_op=True)
work.wait()
dist.destroy_process_group()
