"""Hooks reduce gradients in the order in which they are ready; one rank uses its layers in another order.

kind: async
verdict: size-mismatch | order-swap-within-a-group
line: works.append(dist.all_reduce
culprits: 2
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
works = []


def reduce(parameter):
    works.append(dist.all_reduce(parameter.grad, async_op=True))


encoder, decoder = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)
for layer in (encoder, decoder):
    layer.weight.register_post_accumulate_grad_hook(reduce)
x = torch.randn(4, 8)
if rank == 2:
    loss = decoder(x).sum()
    loss.backward()
    encoder(x).sum().backward()
else:
    encoder(x).sum().backward()
    decoder(x).sum().backward()
for work in works:
    work.wait()
dist.destroy_process_group()
