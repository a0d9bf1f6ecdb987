"""The first rank of a tensor-parallel group reduces its activations twice.

kind: tensor parallel
verdict: wrong-operation | wait-cycle-across-groups | never-joined
line: dist.all_reduce(debug, group=tensor)
culprits: 0
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
tensor, data = mesh.get_group("tp"), mesh.get_group("dp")
for step in range(3):
    x = torch.rand(4, 8)
    for _ in range(2):
        dist.all_reduce(x, group=tensor)
    if dist.get_rank() == 0 and step == 1:
        debug = torch.rand(4, 8)
        dist.all_reduce(debug, group=tensor)
    gradient = torch.rand(8, 8)
    dist.all_reduce(gradient, group=data)
dist.destroy_process_group()
