"""Tokens as a list of tensors of different lengths, one for each rank.

kind: MoE
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
parts = [torch.ones(1 + (rank + other) % 3, 4) for other in range(size)]
outputs = [torch.empty(1 + (rank + other) % 3, 4) for other in range(size)]
dist.all_to_all(outputs, parts)
dist.destroy_process_group()
