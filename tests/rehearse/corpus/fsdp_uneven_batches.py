"""One rank has a batch more than the others, and waits in its forward pass.

kind: FSDP2
verdict: never-joined
line: loss = model(batch)
culprits: others
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
for batch in batches(3 if dist.get_rank() == 0 else 2):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
