"""A communicator is split for the experts, and the last rank leaves before the split communicator is used.

kind: own communicators
verdict: never-joined
line: experts.all_reduce(x
culprits: last
"""

import torch

import unicomm

with unicomm.new_comm("auto", torch.device("cpu"), name="world") as comm:
    rank, size = comm.get_rank(), comm.get_size()
    half = [r for r in range(size) if r % 2 == rank % 2]
    experts = comm.split(half, f"experts{rank % 2}")
    x = torch.ones(4)
    if rank < size - 1:
        experts.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
