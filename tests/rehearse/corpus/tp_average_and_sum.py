"""One rank runs an older copy of the layer, which averages partial results instead of adding them.

kind: tensor parallel
verdict: reduction-mismatch
line: dist.all_reduce(partial, op
culprits: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(list(range(first, first + 4))) for first in range(0, size, 4)]
mine = groups[rank // 4]
weight = torch.randn(16, 4)
op = dist.ReduceOp.AVG if rank == 2 else dist.ReduceOp.SUM
for _ in range(2):
    partial = torch.randn(8, 16) @ weight
    dist.all_reduce(partial, op, group=mine)
dist.destroy_process_group()
