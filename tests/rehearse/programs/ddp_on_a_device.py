"""DDP as training programs write it. Argument: the device, "cuda" or "cpu"."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kind = sys.argv[1]
local = int(os.environ["LOCAL_RANK"])
if kind == "cuda":
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.set_device(local)
    assert torch.cuda.current_device() == local
    device = torch.device("cuda", local)
    dist.init_process_group("nccl", device_id=device)
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.LayerNorm(256)).to(device)
on_gpu = {"device_ids": [local], "output_device": local} if kind == "cuda" else {}
model = DistributedDataParallel(model, gradient_as_bucket_view=True, **on_gpu)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler(kind)
for _ in range(2):
    x = torch.randn(16, 256, device=device)
    x = x.to(kind, non_blocking=True)
    if kind == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = x.cuda()
        torch.cuda.current_stream().wait_stream(stream)
    with torch.autocast(kind, dtype=torch.bfloat16):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    total = loss.detach().clone()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    if kind == "cuda":
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() == 0
dist.barrier(**({"device_ids": [local]} if kind == "cuda" else {}))
dist.destroy_process_group()
