"""The private parts of torch that the rehearsal uses, beside those of `unicomm.c10d.compat`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet, Generator
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unicomm.c10d.compat import has_kernel

#: What fake tensors raise if a layout cannot be told without data.
NO_LAYOUT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
#: Functions on all values of nested lists, tuples and dictionaries.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
#: Modes that get their operations after a user's mode: for fake tensors and while graphs are traced.
_SHAPES_ONLY = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY")]

__all__ = [
    "NO_LAYOUT",
    "FakeTensor",
    "Generator",
    "OpOverload",
    "TorchDispatchMode",
    "asks_for_shapes",
    "cpu_keys",
    "fake_mode",
    "fake_tensor",
    "silence_fake_tensors",
    "tree_leaves",
    "tree_map",
]


def asks_for_shapes() -> bool:
    """Returns whether operations of this thread are run for the layouts of their results only."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _SHAPES_ONLY)


def cpu_keys(func: OpOverload) -> DispatchKeySet:
    """Returns the dispatch keys of an operation's kernel for CPU tensors, below the one of modes."""
    keys = DispatchKeySet(DispatchKey.CPU)
    name: str = func._schema.name + (f".{func._overloadname}" * (func._overloadname != "default"))
    return keys.add(DispatchKey.BackendSelect) if has_kernel(name, "BackendSelect") else keys


def fake_mode() -> Any:
    """Returns a mode in which operations on fake tensors give fake tensors."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def fake_tensor(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor of the same layout and device."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, like, tensor.device)


def silence_fake_tensors() -> None:
    """Keeps torch from logging the errors of operations on fake tensors, which are raised as well."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
