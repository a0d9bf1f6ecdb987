"""A hand-written tensor-parallel layer with autograd functions that reduce forwards and backwards.

kind: tensor parallel
verdict: all-good
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group(list(range(first, first + 4))) for first in range(0, size, 4)]
mine = groups[rank // 4]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=mine)
        return gradient


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x, group=mine)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


up, down = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
for _ in range(2):
    x = torch.randn(4, 16)
    dist.broadcast(x, rank // 4 * 4, group=mine)
    x.requires_grad_()
    Reduce.apply(torch.relu(Copy.apply(x) @ up) @ down).sum().backward()
dist.destroy_process_group()
