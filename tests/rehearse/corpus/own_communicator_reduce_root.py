"""A communicator of unicomm reduces to rank 0, but one rank was configured with another root.

kind: own communicators
verdict: root-mismatch
line: comm.reduce(loss
culprits: 6
"""

import torch

import unicomm

with unicomm.new_comm("auto", torch.device("cpu"), name="metrics") as comm:
    root = 1 if comm.get_rank() == 6 else 0
    loss = torch.ones(1)
    comm.reduce(loss, root, unicomm.ReduceOp.SUM, async_op=False)
