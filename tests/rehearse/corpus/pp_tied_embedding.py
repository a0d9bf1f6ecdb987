"""First and last stage share an embedding, whose gradient the last one reduces before its last message.

kind: pipeline
verdict: wait-cycle-across-groups
line: dist.all_reduce(embedding_gradient, group=ends) | dist.recv(gradient, rank + 1)
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
ends = dist.new_group([0, size - 1])
activation, gradient = torch.randn(4, 16), torch.randn(4, 16)
embedding_gradient = torch.randn(100, 16)
if rank > 0:
    dist.recv(activation, rank - 1)
if rank < size - 1:
    dist.send(activation, rank + 1)
if rank == size - 1:
    dist.all_reduce(embedding_gradient, group=ends)
if rank < size - 1:
    dist.recv(gradient, rank + 1)
if rank > 0:
    dist.send(gradient, rank - 1)
if rank == 0:
    dist.all_reduce(embedding_gradient, group=ends)
dist.destroy_process_group()
