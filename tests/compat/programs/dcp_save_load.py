"""torch.distributed.checkpoint: FSDP2 trains, saves (also in the background), loads, and trains on."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.compat.programs.result import report, shared_folder

dist.init_process_group("cpu:gloo")
mesh = init_device_mesh("cpu", (2,))
losses = []


def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, seed):
    torch.manual_seed(seed + dist.get_rank())
    for _ in range(3):
        x = torch.randn(8, 16)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)


def state(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


with shared_folder() as folder:
    model, optimizer = made(1)
    train(model, optimizer, 10)
    dcp.save(state(model, optimizer), checkpoint_id=f"{folder}/now")
    dcp.async_save(state(model, optimizer), checkpoint_id=f"{folder}/background").result()
    train(model, optimizer, 20)
    for name in ("now", "background"):
        other, its = made(2)
        found = state(other, its)
        dcp.load(found, checkpoint_id=f"{folder}/{name}")
        set_state_dict(other, its, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        train(other, its, 20)
assert losses[3:6] == losses[6:9] == losses[9:12], losses
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
report(losses, get_model_state_dict(model, options=whole))
dist.destroy_process_group()
