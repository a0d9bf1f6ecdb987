"""The inputs of a tensor-parallel group are sent from the first rank, but rank 5 names itself.

kind: tensor parallel
verdict: root-mismatch
line: dist.broadcast(tokens, source
culprits: 5
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(list(range(first, first + 4))) for first in range(0, size, 4)]
tokens = torch.randint(0, 100, (4, 8))
source = rank if rank == 5 else rank // 4 * 4
dist.broadcast(tokens, source, group=groups[rank // 4])
dist.destroy_process_group()
