"""Experts with a fixed capacity in an expert group, and reductions over replicas.

kind: MoE
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "expert"))
replicas, experts = mesh["replica"].get_group(), mesh["expert"].get_group()
weight = torch.randn(8, 8, requires_grad=True)
for _ in range(2):
    slots = torch.randn(size // 2 * 4, 8)
    received = torch.empty_like(slots)
    dist.all_to_all_single(received, slots, group=experts)
    (received @ weight).sum().backward()
    dist.all_reduce(weight.grad, group=replicas)
    weight.grad = None
dist.destroy_process_group()
