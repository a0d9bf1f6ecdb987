"""A server and its workers in functions of their own: every collective comes from two lines.

kind: groups
verdict: all-good
"""

import torch
import torch.distributed as dist


def serve(size):
    weights = torch.rand(8)
    for _ in range(3):
        dist.broadcast(weights, 0)
        gathered = [torch.zeros(8) for _ in range(size)]
        dist.gather(torch.zeros(8), gathered, 0)
        done = torch.zeros(1)
        dist.all_reduce(done)


def work():
    weights = torch.zeros(8)
    for _ in range(3):
        dist.broadcast(weights, 0)
        dist.gather(weights * 2, None, 0)
        flag = torch.ones(1)
        dist.all_reduce(flag)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    serve(dist.get_world_size())
else:
    work()
dist.destroy_process_group()
