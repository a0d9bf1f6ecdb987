"""Training steps with compressing hooks, also from a checkpoint's state on. Prints what came out as JSON.

Arguments: the backend of the group, "ddp" or "fsdp", the wire format, and a folder for checkpoints.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unicomm
from unicomm.c10d import hooks

BACKEND, PARALLEL, WIRE, FOLDER = sys.argv[1:]
STEPS = 6


def model_of(hook, parallel):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    if parallel == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if hook is not None:
            hook.attach(model)
        return model
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if hook is not None:
        wrapped.register_comm_hook(hook, hooks.reduce_compressed)
    return wrapped


def gradients_of(model):
    parts = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        parts.append(gradient.detach().flatten().clone())
    return torch.cat(parts)


def step(model, number):
    torch.manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    (model(torch.randn(32, 64)) * torch.randn(32, 64)).sum().backward()
    return gradients_of(model)


def bits(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def main():
    dist.init_process_group(BACKEND)
    plain = model_of(None, PARALLEL)
    exact = [step(plain, number) for number in range(STEPS)]
    found = {}
    for feedback in (False, True):
        state = hooks.compressed(wire=WIRE, error_feedback=feedback)
        model = model_of(state, PARALLEL)
        got = [step(model, number) for number in range(STEPS)]
        single = max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(got, exact, strict=True))
        total = float((sum(got) - sum(exact)).abs().max() / sum(exact).abs().max())
        found[str(feedback)] = {"single": single, "total": total, "bits": [bits(g) for g in got]}
    # A checkpoint after half of the steps: a new state and a new model go on with the same bits.
    state = hooks.compressed(wire=WIRE)
    model = model_of(state, PARALLEL)
    first = [step(model, number) for number in range(STEPS // 2)]
    file = Path(FOLDER) / f"state-{dist.get_rank()}.pt"
    torch.save(state.state_dict(), file)
    resumed = hooks.compressed(wire=WIRE)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    model = model_of(resumed, PARALLEL)
    rest = [step(model, number) for number in range(STEPS // 2, STEPS)]
    found["resumed"] = [bits(gradient) for gradient in rest]
    found["resumed total"] = float((sum(first) + sum(rest) - sum(exact)).abs().max() / sum(exact).abs().max())
    try:
        hooks.compressed(wire="plain")
    except unicomm.InvalidArgumentError as error:
        found["plain"] = str(error)
    try:
        resumed.load_state_dict({"version": 1})
    except unicomm.InvalidArgumentError as error:
        found["damaged"] = str(error)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [found[key]["bits"] for key in ("False", "True")])
    found["alike"] = all(one == everyone[0] for one in everyone)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    # A thread of torch's Gloo may wait for ever to release a tensor while Python ends (pytorch#190489).
    os._exit(0)


main()
