"""Rank 0 alone asks for the full state dictionary, which all ranks have to gather.

kind: FSDP2
verdict: wrong-operation
line: state = get_model_state_dict
culprits: 0
"""

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
if dist.get_rank() == 0:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
dist.barrier()
dist.destroy_process_group()
