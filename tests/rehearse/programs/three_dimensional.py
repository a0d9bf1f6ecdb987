"""A small transformer, parallel in three dimensions: FSDP2, tensor parallel, and pipeline stages.

Arguments: the sizes of the dimensions `pipeline data tensor`, and the number of steps.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pipeline, data, tensor, steps = map(int, sys.argv[1:])
WIDTH, TOKENS, BATCH = 32, 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (pipeline, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
stage_number = mesh["pp"].get_local_rank()
torch.manual_seed(stage_number)
blocks = nn.Sequential(Block(), Block())
for block in blocks:
    if tensor > 1:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(blocks, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(blocks.parameters(), 1e-3, foreach=False)
stage = PipelineStage(blocks, stage_number, pipeline, torch.device("cpu"), group=mesh["pp"].get_group())
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
for _ in range(steps):
    inputs, target = torch.randn(BATCH, TOKENS, WIDTH), torch.zeros(BATCH, TOKENS, WIDTH)
    losses = []
    if stage_number == 0:
        schedule.step(inputs, **({"target": target, "losses": losses} if pipeline == 1 else {}))
    elif stage_number == pipeline - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        loss = torch.stack(losses).mean().detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        assert torch.isfinite(loss), loss
dist.destroy_process_group()
