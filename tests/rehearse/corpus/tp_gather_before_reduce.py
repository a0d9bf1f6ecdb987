"""In a hand-written layer one rank takes the sequence-parallel path, and gathers where the others reduce.

kind: tensor parallel
verdict: wrong-operation
line: dist.all_gather_into_tensor(whole, x)
culprits: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
sequence_parallel = rank == 3
x = torch.randn(4, 16)
if sequence_parallel:
    whole = torch.empty(4 * size, 16)
    dist.all_gather_into_tensor(whole, x)
    x = whole[:4]
dist.all_reduce(x)
dist.barrier()
dist.destroy_process_group()
