"""torch's 1F1B schedule.

kind: pipeline
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
stage = PipelineStage(Block(), rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 2 * size, loss_fn=nn.functional.mse_loss)
x, target = torch.randn(4 * size, 16), torch.zeros(4 * size, 16)
arguments, more = ((x,) if rank == 0 else ()), ({"target": target} if rank == size - 1 else {})
for _ in range(2):
    schedule.step(*arguments, **more)
dist.destroy_process_group()
