"""A collective that only rank 0 calls."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(4)
dist.all_reduce(total)
if dist.get_rank() == 0:
    mean = total.clone()
    dist.all_reduce(mean)
    print("mean", mean)
dist.barrier()
dist.destroy_process_group()
