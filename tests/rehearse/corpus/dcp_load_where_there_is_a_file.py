"""Each rank looks into its local folder whether there is a checkpoint; those of the first node have none.

kind: DCP
verdict: never-joined
line: dcp.load(state
culprits: 0-3
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank = dist.get_rank()
state = {"weight": torch.ones(4)}
with tempfile.TemporaryDirectory() as folder:
    if rank >= 4:  # the second node has trained before
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    if os.listdir(folder):
        dcp.load(state, checkpoint_id=folder)
