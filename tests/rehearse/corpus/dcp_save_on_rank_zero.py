"""Rank 0 alone saves a distributed checkpoint, as it would have called `torch.save`.

kind: DCP
verdict: wrong-operation
line: dcp.save(state
culprits: 0
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
state = {"weight": torch.ones(4)}
if dist.get_rank() == 0:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder)
dist.barrier()
dist.destroy_process_group()
