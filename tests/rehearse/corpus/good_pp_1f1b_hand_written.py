"""A hand-written 1F1B schedule, with batches of messages where both directions meet.

kind: pipeline
verdict: all-good
"""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

MICRO_BATCHES = 8
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
activation, gradient = torch.randn(4, 16), torch.randn(4, 16)


def exchange(*messages):
    ops = [P2POp(op, torch.empty(4, 16) if op is irecv else activation, peer) for op, peer in messages]
    for work in batch_isend_irecv(ops) if ops else []:
        work.wait()


first, last = rank == 0, rank == size - 1
warm_up = min(size - 1 - rank, MICRO_BATCHES)
steady = MICRO_BATCHES - warm_up
for _ in range(warm_up):
    exchange(*([] if first else [(irecv, rank - 1)]))
    exchange(*([] if last else [(isend, rank + 1)]))
if steady:
    exchange(*([] if first else [(irecv, rank - 1)]))
for number in range(steady):
    exchange(*([] if last else [(isend, rank + 1), (irecv, rank + 1)]))
    more = number < steady - 1
    exchange(*([] if first else [(isend, rank - 1), *([(irecv, rank - 1)] if more else [])]))
for _ in range(warm_up):
    exchange(*([] if last else [(irecv, rank + 1)]))
    exchange(*([] if first else [(isend, rank - 1)]))
dist.destroy_process_group()
