"""The capacity of the experts is computed from the own batch, which is larger on one rank.

kind: MoE
verdict: size-mismatch
line: dist.all_to_all_single(received, slots)
culprits: 0
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
batch = 96 if rank == 0 else 64
capacity = 2 * batch // size
slots = torch.zeros(size * capacity, 8)
received = torch.empty_like(slots)
dist.all_to_all_single(received, slots)
dist.destroy_process_group()
