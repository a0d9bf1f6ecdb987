"""Rank 3 runs out of memory in a step, catches it, and goes on with its next batch without a reduction.

kind: DDP
verdict: wrong-operation | never-joined
line: dist.all_reduce(parameter.grad) | dist.barrier()
culprits: 3
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron

dist.init_process_group("gloo")
rank = dist.get_rank()
model = perceptron()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step, batch in enumerate(batches(4)):
    try:
        if rank == 3 and step == 2:
            raise RuntimeError("out of memory")
        model(batch).mean().backward()
    except RuntimeError:
        optimizer.zero_grad()
        continue
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
