"""A sharded model and its optimizer are saved and loaded by all ranks.

kind: DCP
verdict: all-good
values: real
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import Block, batches
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder, 0)
model = nn.Sequential(Block(), Block())
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.001, foreach=False)
for batch in batches(1):
    model(batch).sum().backward()
    optimizer.step()
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
dist.barrier()
if dist.get_rank() == 0:
    shutil.rmtree(folder[0])
dist.destroy_process_group()
