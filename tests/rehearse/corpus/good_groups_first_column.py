"""Only the first column of a mesh averages a metric over its group.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))
for _ in range(2):
    x = torch.rand(4)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    if mesh.get_local_rank("tp") == 0:
        dist.all_reduce(x, group=mesh.get_group("dp"))
dist.destroy_process_group()
