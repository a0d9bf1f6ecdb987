"""The scenes `ddp` and `fsdp2`: a model is trained, and faults strike within its backward.

The ranks say a step at each layer of each backward, while the gradients of the layers before it are being
reduced. After a backward each rank compares its gradients with those of all ranks' batches, which it computes
itself.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import unicomm
from tests.chaos.spec import Say, Spec, WrongDataError, open_store, prepare
from unicomm.c10d.process_group import UnicommProcessGroup

LAYERS = 8
_WIDTH, _BATCH, _RATE = 64, 4, 0.05
_BUCKET = 0.01  # MB: less than a layer has


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Model(torch.nn.Module):
    """Calls `reached` when the backward comes to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.reached = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(self._note)
        return x

    def _note(self, _: torch.Tensor) -> None:
        self.reached()


def play(spec: Spec, say: Say, closing: contextlib.ExitStack) -> None:
    os.environ["UNICOMM_BACKEND"] = spec.backend
    store = open_store(spec)
    prepare(spec)
    dist.init_process_group(
        "unicomm",
        store=store,
        rank=spec.rank,
        world_size=spec.size,
        timeout=timedelta(minutes=1),
        pg_options={"between": spec.between} if spec.between else None,
    )
    del store
    closing.callback(_destroy)
    torch.manual_seed(spec.seed)
    plain = Model()
    model, wrapped = copy.deepcopy(plain), None
    if spec.scene == "ddp":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=_BUCKET)
    else:
        mesh = init_device_mesh("cpu", (spec.size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    step = 0

    def reached() -> None:
        nonlocal step
        say("step", step)
        step += 1

    model.reached = reached
    dist.barrier()
    group = dist.group.WORLD
    assert isinstance(group, UnicommProcessGroup)
    group.get_comm().set_timeout(spec.timeout)
    try:
        _train(spec, wrapped, model, plain)
    except unicomm.CommError:
        raise
    except RuntimeError as error:
        # torch's Reducer passes on the text of an error; the group has the error itself.
        text = str(error)
        try:
            dist.barrier()
        except unicomm.CommError as known:
            if type(known).__name__ in text:
                raise known from None
        raise
    dist.barrier()
    _destroy()


def _train(spec: Spec, wrapped: torch.nn.Module, model: Model, plain: Model) -> None:
    for turn in range(spec.steps // LAYERS):
        batches = [_batch(spec.seed * 100 + turn * 10 + r) for r in range(spec.size)]
        wrapped(batches[spec.rank]).square().mean().backward()
        plain(torch.cat(batches)).square().mean().backward()
        _compare(list(model.parameters()), list(plain.parameters()), spec)
        with torch.no_grad():
            for trained in (model, plain):
                for p in trained.parameters():
                    p.sub_(_RATE * p.grad)
                    p.grad = None


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(seed))


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _compare(mine: Sequence[torch.nn.Parameter], plain: Sequence[torch.nn.Parameter], spec: Spec) -> None:
    """Raises `WrongDataError` when a gradient, or the part of it that this rank has, is not the right one."""
    for at, (p, q) in enumerate(zip(mine, plain, strict=True)):
        got, expected = p.grad, q.grad
        assert expected is not None
        if isinstance(got, DTensor):
            got, expected = got.to_local(), torch.chunk(expected, spec.size)[spec.rank]
        if got is None or not torch.allclose(got, expected, rtol=1e-4, atol=1e-6):
            raise WrongDataError(f"gradient {at}: {got}, not {expected}")
