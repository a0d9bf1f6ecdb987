"""The second replica skips the reduction over replicas in its last step.

kind: groups
verdict: never-joined | wrong-operation
line: dist.all_reduce(gradient, group=across)
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "shard"))
across, within = mesh["replica"].get_group(), mesh["shard"].get_group()
gradient = torch.ones(16)
steps = 3
for step in range(steps):
    dist.all_reduce(gradient, group=within)
    if step < steps - 1 or rank < size // 2:
        dist.all_reduce(gradient, group=across)
