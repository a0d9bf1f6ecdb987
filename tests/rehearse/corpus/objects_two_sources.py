"""Rank 3 thinks that it is the source of the settings.

kind: objects
verdict: root-mismatch
line: dist.broadcast_object_list(settings, source)
culprits: 3
"""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
source = int(os.environ["RANK"]) if os.environ["RANK"] == "3" else 0
settings = [{"seed": 1}]
dist.broadcast_object_list(settings, source)
dist.destroy_process_group()
