"""Sharded parameters that are gathered as bfloat16 and whose gradients are reduced as float32.

kind: FSDP2
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block, batches
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = nn.Sequential(Block(), Block())
for block in model:
    fully_shard(block, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mp_policy=policy)
for batch in batches(2):
    model(batch).float().square().mean().backward()
dist.destroy_process_group()
