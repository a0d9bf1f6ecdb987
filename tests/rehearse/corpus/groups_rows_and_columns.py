"""The ranks on the diagonal of a mesh reduce over their column first, all others over their row.

kind: groups
verdict: wait-cycle-across-groups
line: dist.all_reduce(x, group=row) | dist.all_reduce(x, group=column)
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("row", "column"))
row, column = mesh["column"].get_group(), mesh["row"].get_group()
x = torch.ones(32)
if mesh["row"].get_local_rank() == mesh["column"].get_local_rank():
    dist.all_reduce(x, group=column)
    dist.all_reduce(x, group=row)
else:
    dist.all_reduce(x, group=row)
    dist.all_reduce(x, group=column)
dist.destroy_process_group()
