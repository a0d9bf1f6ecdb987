"""All ranks save a plain checkpoint; received plans are made up.

kind: DCP
verdict: all-good
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder, 0)
dcp.save({"weight": torch.ones(4, 4)}, checkpoint_id=folder[0])
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
