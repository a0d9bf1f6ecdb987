"""Parameters are gathered ahead; the last rank has no next batch and leaves the loop before it gathers.

kind: async
verdict: never-joined | wrong-operation
line: ahead = dist.all_gather_into_tensor(
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
shard, whole = torch.ones(8), torch.empty(8 * size)
steps = 2 if rank < size - 1 else 1
ahead = None
for _ in range(steps):
    if ahead is not None:
        ahead.wait()
    ahead = dist.all_gather_into_tensor(whole, shard, async_op=True)
ahead.wait()
