"""All ranks reduce over their row first, then over their column.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("row", "column"))
x = torch.ones(32)
for _ in range(2):
    for name in ("column", "row"):
        dist.all_reduce(x, group=mesh[name].get_group())
dist.destroy_process_group()
