"""A server and its workers in functions of their own; the server asks for one round too many.

kind: groups
verdict: wrong-operation | never-joined
line: dist.gather(torch.zeros(8), gathered, 0)  # last | dist.barrier()
"""

import torch
import torch.distributed as dist


def serve(size):
    weights = torch.rand(8)
    gathered = [torch.zeros(8) for _ in range(size)]
    for _ in range(5):
        dist.broadcast(weights, 0)
        dist.gather(torch.zeros(8), gathered, 0)
    dist.gather(torch.zeros(8), gathered, 0)  # last


def work():
    weights = torch.zeros(8)
    for _ in range(5):
        dist.broadcast(weights, 0)
        dist.gather(weights * 2, None, 0)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    serve(dist.get_world_size())
else:
    work()
dist.barrier()
dist.destroy_process_group()
