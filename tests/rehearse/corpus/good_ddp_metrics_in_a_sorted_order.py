"""Metrics are summed in the order of a set of names that is sorted.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 5))
names = ("loss", "accuracy", "confusion", "per_class", "calibration")
for _ in range(3):
    output = model(torch.randn(4, 8))
    output.sum().backward()
    sizes = {"confusion": (5, 5), "per_class": (5,), "calibration": (10,)}
    metrics = {name: torch.zeros(sizes.get(name, ())) for name in names}
    for name in sorted({name for name in metrics if name != "loss"}):
        dist.all_reduce(metrics[name])
dist.barrier()
dist.destroy_process_group()
