"""The ranks of a tensor-parallel group get batches of different lengths, because each has padded its own.

kind: tensor parallel
verdict: size-mismatch
line: return self.down(torch.relu(self.up(x)))
culprits: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 4, 4), mesh_dim_names=("dp", "tp"))
block = Block()
parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
longest = 12 if rank == 1 else 10
block(torch.randn(2, longest, 16)).sum().backward()
dist.destroy_process_group()
