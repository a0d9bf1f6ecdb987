"""Some ranks warm up without communication, and print at their own times.

kind: DDP
verdict: all-good
"""

import torch.distributed as dist
from small_models import batches, perceptron
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(perceptron())
if rank % 2:
    with model.no_sync():
        for batch in batches(rank):
            model(batch).mean().backward()
    model.zero_grad()
for step, batch in enumerate(batches(3)):
    loss = model(batch).mean()
    loss.backward()
    if rank == step:
        print("loss", loss.item())
dist.destroy_process_group()
