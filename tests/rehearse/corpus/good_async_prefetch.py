"""Parameters of the next layer are gathered while the present one computes; gradients are scattered behind.

kind: async
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
size = dist.get_world_size()
shards = [torch.randn(16 * 16 // size) for _ in range(4)]
whole = [torch.empty(16 * 16) for _ in shards]
x = torch.randn(4, 16)
works = [dist.all_gather_into_tensor(whole[0], shards[0], async_op=True)]
for number in range(4):
    if number < 3:
        works.append(dist.all_gather_into_tensor(whole[number + 1], shards[number + 1], async_op=True))
    works[number].wait()
    x = x @ whole[number].reshape(16, 16)
behind = []
for number in reversed(range(4)):
    out = torch.empty_like(shards[number])
    behind.append(dist.reduce_scatter_tensor(out, torch.randn(16 * 16), async_op=True))
for work in behind:
    work.wait()
dist.destroy_process_group()
