"""A tensor-parallel rank skips a layer's reduction if its part of the batch is empty.

kind: tensor parallel
verdict: wrong-operation | never-joined
line: dist.all_reduce(x, group=tensor) | dist.all_gather_into_tensor(out
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))
tensor, data = mesh.get_group("tp"), mesh.get_group("dp")
for step in range(3):
    x = torch.rand(4, 8)
    for layer in range(3):
        if not (rank == 2 and step == 1 and layer == 1):
            dist.all_reduce(x, group=tensor)
    out = torch.zeros(16, 8)
    dist.all_gather_into_tensor(out, x, group=tensor)
    gradient = torch.rand(8, 8)
    dist.all_reduce(gradient, group=data)
dist.destroy_process_group()
