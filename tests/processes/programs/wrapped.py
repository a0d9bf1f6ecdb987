"""A model in a wrapper of torch (DDP or FSDP2) trains; then rank 1 sleeps before its next step."""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.layer(x))


def wrapped(kind):
    if kind == "ddp":
        return DistributedDataParallel(torch.nn.Sequential(Block(), Block()))
    model = torch.nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model):
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()


def train(model, steps):
    for _ in range(steps):
        step(model)


def main():
    dist.init_process_group("gloo")
    model = wrapped(sys.argv[1])
    train(model, 3)
    if dist.get_rank() == 1:
        print("asleep", flush=True)
        time.sleep(600)
    train(model, 1)


if __name__ == "__main__":
    main()
