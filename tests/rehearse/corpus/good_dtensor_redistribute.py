"""Tensors that are distributed, redistributed and gathered.

kind: tensor parallel
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
x = distribute_tensor(torch.randn(16, 32), mesh, [Shard(0), Shard(1)])
y = x.redistribute(mesh, [Shard(0), Replicate()])
z = (y @ y.t()).redistribute(mesh, [Replicate(), Replicate()])
print(z.full_tensor().shape, x.full_tensor().shape)
dist.destroy_process_group()
