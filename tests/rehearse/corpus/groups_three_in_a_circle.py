"""Three ranks share three pairs, and each begins with another pair.

kind: groups
verdict: wait-cycle-across-groups
line: dist.all_reduce(torch.ones(4), group=pair)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ab, bc, ca = dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])
order = {0: [ab, ca], 1: [bc, ab], 2: [ca, bc]}.get(rank, [])
for pair in order:
    dist.all_reduce(torch.ones(4), group=pair)
dist.destroy_process_group()
