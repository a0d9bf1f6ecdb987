"""Small buckets and a communication hook that sends half-precision gradients.

kind: DDP
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.002)
model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in batches(3):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
