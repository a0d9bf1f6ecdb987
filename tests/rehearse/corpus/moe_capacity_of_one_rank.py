"""Experts with a fixed capacity, and one rank with another capacity factor: its own part does not fit.

kind: MoE
verdict: exception
line: received, tokens, receive, send
culprits: 2
"""

import torch
import torch.distributed as dist

CAPACITY, HIDDEN = 4, 16
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
expert = torch.nn.Linear(HIDDEN, HIDDEN)


def dispatch(tokens, capacity):
    send, receive = [capacity] * size, [CAPACITY] * size
    received = torch.empty(sum(receive), HIDDEN)
    dist.all_to_all_single(received, tokens, receive, send)
    back = torch.empty(sum(send), HIDDEN)
    dist.all_to_all_single(back, expert(received).detach(), send, receive)
    return back


for _ in range(2):
    capacity = CAPACITY + (rank == 2)
    dispatch(torch.randn(size * capacity, HIDDEN), capacity)
dist.destroy_process_group()
