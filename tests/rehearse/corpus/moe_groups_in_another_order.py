"""The expert group exchanges before the replicas reduce, but on two ranks it is the other way round.

kind: MoE
verdict: wait-cycle-across-groups
line: dist.all_to_all_single(received, tokens, group=experts) | dist.all_reduce(balance, group=replicas)
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "expert"))
replicas, experts = mesh["replica"].get_group(), mesh["expert"].get_group()
tokens, balance = torch.randn(size // 2 * 4, 8), torch.ones(2)


def exchange():
    received = torch.empty_like(tokens)
    dist.all_to_all_single(received, tokens, group=experts)


def average():
    dist.all_reduce(balance, group=replicas)


swapped = mesh["replica"].get_local_rank() == mesh["expert"].get_local_rank()
steps = [average, exchange] if swapped else [exchange, average]
for step in steps:
    step()
dist.destroy_process_group()
