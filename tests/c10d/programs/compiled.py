"""Compiled and exported programs with collectives, and FSDP1. The program names no backend.

compiled.py FOLDER: each rank writes its results to FOLDER/RANK.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
results = []


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(made, step):
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        results.append(round(loss.item(), 6))


ddp = DistributedDataParallel(model())
train(ddp, torch.compile(ddp))  # inductor
fsdp = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
train(fsdp, fsdp)


def summed(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + x.shape[0]


graphs = torch.compile(summed, dynamic=True, fullgraph=True)
results += [graphs(torch.full((n,), rank + 1.0)).tolist() for n in (3, 5, 9)]


def inplace(x):
    dist.all_reduce(x)
    return x + 1


results.append(torch.compile(inplace, fullgraph=True)(torch.full((4,), rank + 1.0)).tolist())


class Summed(torch.nn.Module):
    def forward(self, x):
        return summed(x)


exported = torch.export.export(Summed(), (torch.ones(4),))
names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
results.append([name for name in names if "c10d" in name])
results.append(exported.module()(torch.full((4,), rank + 1.0)).tolist())

(Path(sys.argv[1]) / str(rank)).write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
