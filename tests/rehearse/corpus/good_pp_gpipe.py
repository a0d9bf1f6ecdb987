"""torch's GPipe schedule.

kind: pipeline
verdict: all-good
"""

import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
stage = PipelineStage(Block(), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
x, target = torch.randn(8, 16), torch.zeros(8, 16)
for _ in range(2):
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        losses = []
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
dist.destroy_process_group()
