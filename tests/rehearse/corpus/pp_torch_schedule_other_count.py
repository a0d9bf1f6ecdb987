"""torch's 1F1B schedule, but the last stage was told another number of micro-batches.

kind: pipeline
verdict: unmatched-send-or-recv
line: schedule.step(
"""

import torch
import torch.distributed as dist
from small_models import Block
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
stage = PipelineStage(Block(), rank, size, torch.device("cpu"))
micro_batches = 2 * size if rank < size - 1 else size
schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)
x, target = torch.randn(2 * micro_batches, 16), torch.zeros(2 * micro_batches, 16)
arguments, more = ((x,) if rank == 0 else ()), ({"target": target} if rank == size - 1 else {})
schedule.step(*arguments, **more)
dist.destroy_process_group()
