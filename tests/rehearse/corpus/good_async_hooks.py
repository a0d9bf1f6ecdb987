"""Gradients are reduced asynchronously in hooks, and awaited before the optimizer's step.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import batches, perceptron

dist.init_process_group("gloo")
works = []
model = perceptron()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda p: works.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True))
    )
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in batches(2):
    model(batch).sum().backward()
    for work in works:
        work.wait()
    works.clear()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
