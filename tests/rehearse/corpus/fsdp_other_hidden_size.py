"""One rank has a model of another hidden size; its shards differ in size.

kind: FSDP2
verdict: size-mismatch
line: model(torch.randn(4, 16))
culprits: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
hidden = 64 if dist.get_rank() == 1 else 32
model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 16))
fully_shard(model)
model(torch.randn(4, 16)).sum().backward()
dist.destroy_process_group()
