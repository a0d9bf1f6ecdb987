"""One rank reads another width from its configuration, and builds a larger model, which DDP refuses.

kind: DDP
verdict: exception
line: model = DistributedDataParallel
culprits: 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
configuration = {"hidden": 32}
if dist.get_rank() == 3:
    configuration["hidden"] = 48
hidden = configuration["hidden"]
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 1)))
model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
