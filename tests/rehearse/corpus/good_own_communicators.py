"""Communicators of unicomm: split, with collectives, messages in a batch, and asynchronous works.

kind: own communicators
verdict: all-good
"""

import torch

import unicomm

with unicomm.new_comm("auto", torch.device("cpu"), name="world") as comm:
    rank, size = comm.get_rank(), comm.get_size()
    x = torch.ones(4)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, async_op=False)
    work = comm.broadcast(x, 0, async_op=True)
    work.wait()
    pairs = comm.split([r for r in range(size) if r // 2 == rank // 2], f"pair{rank // 2}")
    pairs.barrier(async_op=False)
    batch = comm.batch_op_create()
    received = torch.empty(4)
    batch.send(x, (rank + 1) % size)
    batch.recv(received, (rank - 1) % size)
    batch.issue(async_op=False)
    pairs.finalize()
