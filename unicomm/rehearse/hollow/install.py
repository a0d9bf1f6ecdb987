"""Makes a process ready for hollow tensors: pickling, objects that travel, and torch.compile."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unicomm.comms import objects

from ..compat import silence_fake_tensors
from ..values.notes import OBJECTS
from . import memory
from .memory import LEAST, PLAIN, reserve, was_hollow
from .mode import HollowTensors


def warm_up() -> None:
    """Imports what the first propagation of shapes imports, so that forked ranks share it."""
    memory.set_least(LEAST)
    try:
        with HollowTensors():
            layer = torch.nn.Linear(256, 256)
            layer(torch.empty(256, 256)).sum().backward()
    finally:
        memory.set_least(None)


def install(least: int) -> None:
    """Has storages of `least` or more bytes be hollow in this process, in threads that enter `HollowTensors`.

    Objects keep their data when they travel between ranks. A hollow tensor within them, or in a file of
    `torch.save`, is its layout alone. Compiled functions run as they are written: torch.compile does not look
    into functions while a dispatch mode is active.
    """
    memory.set_least(least)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # The program raises what torch's rules raise, so torch need not log it as well.
    silence_fake_tensors()
    reduce: Any = torch.Tensor.__reduce_ex__

    def reduce_hollow(self: torch.Tensor, protocol: Any) -> Any:
        if self.__class__ in PLAIN and was_hollow(self):
            kind = torch.nn.Parameter if isinstance(self, torch.nn.Parameter) else torch.Tensor
            return rebuild, (kind, tuple(self.shape), self.stride(), self.dtype, self.requires_grad)
        return reduce(self, protocol)

    torch.Tensor.__reduce_ex__ = reduce_hollow  # type: ignore[method-assign]
    torch.serialization.add_safe_globals([rebuild, torch.nn.Parameter, torch.Tensor])
    for module in (dist, c10d, objects):
        for name in OBJECTS:
            if function := getattr(module, name, None):
                setattr(module, name, _with_data(function))


def rebuild(
    kind: type, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    """Returns a hollow tensor or parameter that was pickled as its layout."""
    tensor = reserve(size, stride, dtype)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which computes all tensors while it runs."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with memory.computed():
            return function(*args, **named)

    return call
