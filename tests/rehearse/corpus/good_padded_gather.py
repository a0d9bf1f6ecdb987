"""Ranks with different numbers of results gather the numbers first, then padded results.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.randn(rank % 3 + 1, 4)
counts = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
dist.all_gather(counts, torch.tensor(len(mine)))
longest = 3
padded = torch.zeros(longest, 4)
padded[: len(mine)] = mine
everything = [torch.empty(longest, 4) for _ in range(size)]
dist.all_gather(everything, padded)
dist.destroy_process_group()
