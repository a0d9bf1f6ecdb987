"""The first rank of each tensor-parallel group prints a sharded result, whose full tensor all have to gather.

kind: tensor parallel
verdict: wrong-operation | never-joined
line: print(result.full_tensor()
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 4, 4), mesh_dim_names=("dp", "tp"))
layer = nn.Linear(16, 32)
plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
parallelize_module(layer, mesh["tp"], plan)
result = layer(torch.randn(4, 16))
if mesh["tp"].get_local_rank() == 0:
    print(result.full_tensor().shape)
