"""Ranks of a mesh TP x DP with more groups of the same ranks: `groups.py FOLDER` or `groups.py deadlock`."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
x = torch.ones(1000)
if sys.argv[1] == "deadlock":
    dist.all_reduce(x, group=(one, two)[rank])
third = dist.new_group([0, 1], group_desc="evaluation")
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
with torch.profiler.profile() as prof:
    for _ in range(4):
        dist.all_reduce(x)
        dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.all_reduce(x, group=mesh.get_group("dp"))
        if rank == 0:
            dist.recv(x, 1)
        if rank == 1:
            time.sleep(0.005)  # the receive begins before the send
            dist.send(x, 0)
        if rank in (2, 3):
            (dist.send if rank == 2 else dist.recv)(x, 5 - rank)
        if rank < 2:
            for group in (one, two, third):
                dist.all_reduce(x, group=group)
    if rank == 2:
        dist.send(torch.ones(500), 3)
    if rank == 3:
        dist.recv(torch.ones(500), 2)
prof.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json")
dist.barrier()
dist.destroy_process_group()
