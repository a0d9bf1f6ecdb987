"""All ranks gather the full state dictionary, and rank 0 keeps it.

kind: FSDP2
verdict: all-good
"""

import io

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(Block(), Block())
fully_shard(model)
for batch in batches(1):
    model(batch).sum().backward()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    torch.save(state, io.BytesIO())
dist.barrier()
dist.destroy_process_group()
