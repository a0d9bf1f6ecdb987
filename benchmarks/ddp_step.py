"""A data-parallel training step, for benchmarks/forecast.py. Arguments: width, rows of a batch, steps."""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WARM_UP = 6, 3

width, rows, steps = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
batch = torch.randn(rows, width)
times = []
for _ in range(steps):
    begin = time.perf_counter()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter() - begin)
if dist.get_rank() == 0:
    print(f"step {statistics.median(times[WARM_UP:]):.6f} s, least {min(times[WARM_UP:]):.6f} s")
dist.destroy_process_group()
