"""A tensor-parallel block whose groups get the same inputs.

kind: tensor parallel
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 4, 4), mesh_dim_names=("dp", "tp"))
block = Block()
parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
torch.manual_seed(mesh["dp"].get_local_rank())
length = 8 + 2 * mesh["dp"].get_local_rank()
for _ in range(2):
    block(torch.randn(2, length, 16)).sum().backward()
dist.destroy_process_group()
