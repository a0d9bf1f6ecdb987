"""The length to which results are padded is the largest one of all ranks, which real values tell.

kind: async
verdict: all-good
values: real
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.randn(rank % 3 + 1, 4)
longest = torch.tensor(len(mine))
dist.all_reduce(longest, dist.ReduceOp.MAX)
padded = torch.zeros(int(longest), 4)
padded[: len(mine)] = mine
everything = [torch.empty(int(longest), 4) for _ in range(size)]
dist.all_gather(everything, padded)
assert torch.equal(everything[rank][: len(mine)], mine)
dist.destroy_process_group()
