"""A rank whose batch routes no token leaves out the exchange.

kind: MoE
verdict: wrong-operation
line: dist.barrier()
culprits: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(2):
    kept = 0 if rank == 2 and step == 1 else 4
    tokens = torch.randn(kept * size, 8)
    if len(tokens):
        received = torch.empty_like(tokens)
        dist.all_to_all_single(received, tokens)
dist.barrier()
dist.destroy_process_group()
