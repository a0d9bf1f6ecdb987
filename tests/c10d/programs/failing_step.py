"""A training step in which a rank is lost, late, or calls another collective, in the middle of the backward.

    failing_step.py MODEL FAULT FOLDER

MODEL: "ddp", "hook" (DDP with a communication hook), "fsdp" or "compiled". FAULT: "lost", "late" or
"mismatch".
Rank 1 is at fault, in the third step. A rank that fails writes a checkpoint in a `finally` block, then the
exception to FOLDER/RANK, and exits with 3.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()


class Fault(torch.autograd.Function):
    """Passes the gradient on; in the third step of rank 1 the fault happens here."""

    step = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if rank == 1 and Fault.step == 2:
            if fault == "lost":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "late":
                time.sleep(60)
            else:
                dist.all_reduce(torch.ones(7))
        return grad


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        return fully_shard(model)
    # torch.compile wants a first bucket that is smaller than the others.
    model = DistributedDataParallel(model, bucket_cap_mb=25 if kind == "compiled" else 0.01)
    if kind == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return torch.compile(model, backend="aot_eager") if kind == "compiled" else model


model = make()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    try:
        for Fault.step in range(5):
            if fault == "late" and Fault.step == 2:  # from here on, so that nothing else can time out
                dist.barrier()
                dist.group.WORLD._get_backend(torch.device("cpu")).get_comm().set_timeout(4.0)
            optimizer.zero_grad()
            Fault.apply(model(torch.randn(4, 64))).sum().backward()
            optimizer.step()
    finally:
        torch.save({"step": Fault.step}, folder / f"checkpoint-{rank}")
except Exception as error:
    (folder / str(rank)).write_text(f"{type(error).__name__}: {error}")
    sys.exit(3)
