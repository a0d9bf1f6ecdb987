"""The dispatch mode that answers operations on hollow tensors."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch.distributed import distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from unicomm.c10d.compat import LOOKS_AWAY, has_kernel
from unicomm.comms import objects

from ..values.notes import OBJECTS
from . import memory
from .memory import PLAIN, is_hollow, make_up, reserve
from .rules import Operation, Result, Way, operation_of, plan

aten = torch.ops.aten
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL
_PROXY = torch._C._TorchDispatchModeKey.PROXY


class HollowTensors(TorchDispatchMode):
    """Answers operations on hollow tensors while it is entered, and makes large results hollow."""

    def __init__(self) -> None:
        super().__init__()
        setattr(self, LOOKS_AWAY, True)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(torch._C._get_dispatch_mode(key) is not None for key in (_FAKE, _FUNCTIONAL, _PROXY)):
            return func(*args, **kwargs)  # only shapes are asked for
        for cls in types:
            if cls not in PLAIN:
                # Fake tensors compute nothing. Other subclasses take the operation apart, within this mode.
                return func(*args, **kwargs) if issubclass(cls, FakeTensor) else NotImplemented
        operation = operation_of(func)
        if operation.way is Way.DECOMPOSE:
            with self:
                if func._can_decompose():
                    return func.decompose(*args, **kwargs)
                return func.redispatch(_keys(func), *args, **kwargs)
        if operation.way is Way.RUN:
            answer = _READS.get(func)
            return func(*args, **kwargs) if answer is None else answer(func, *args, **kwargs)
        results, hollow = plan(func, operation, args, kwargs)
        if results is None:
            return func(*args, **kwargs)
        if operation.written:
            self._write(operation, args, kwargs)
        truth = func.overloadpacket is aten.all
        made = [
            (args[place] if isinstance(place, int) else kwargs[place])
            if place is not None
            else pytree.tree_map(lambda one: _make(one, truth), result)
            for place, result in zip(operation.returns, results, strict=True)
        ]
        if operation.single:
            return made[0]
        return tuple(made) if made else None

    def _write(self, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Gives small arguments that an operation would write values."""
        for place in operation.written:
            target = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in target if isinstance(target, (list, tuple)) else (target,):
                if tensor is not None and not is_hollow(tensor) and (operation.is_out or tensor.numel() != 1):
                    make_up(tensor)


def _keys(func: Any) -> Any:
    """Returns the dispatch keys of an operation's kernel for CPU tensors, below the one of modes."""
    keys = torch._C.DispatchKeySet(DispatchKey.CPU)
    if has_kernel(func.name(), "BackendSelect"):
        keys = keys.add(DispatchKey.BackendSelect)
    return keys


def _make(result: Any, truth: bool) -> Any:
    if not isinstance(result, Result):
        return result
    if result.large:
        return reserve(result.size, result.stride, result.dtype)
    return make_up(torch.empty_strided(result.size, result.stride, dtype=result.dtype), truth)


def _number(func: Any, tensor: torch.Tensor) -> Any:
    if not is_hollow(tensor):
        return func(tensor)
    return make_up(torch.empty((), dtype=tensor.dtype)).item()


def _equal(func: Any, one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_hollow(one) or is_hollow(other):
        return one.shape == other.shape and one.dtype == other.dtype
    return bool(func(one, other))


_READS: dict[Any, Any] = {aten._local_scalar_dense.default: _number, aten.equal.default: _equal}


def install(least: int = memory.LEAST) -> None:
    """Has storages of `least` or more bytes be hollow in this process, in threads that enter the mode.

    Objects keep their data when they travel between ranks. A hollow tensor within them, or in a file of
    `torch.save`, is its layout alone. torch.compile returns what it is given: it cannot see through the mode.
    """
    memory.set_least(least)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    reduce: Any = torch.Tensor.__reduce_ex__

    def reduce_hollow(self: torch.Tensor, protocol: Any) -> Any:
        if self.__class__ in PLAIN and is_hollow(self):
            return rebuild, (tuple(self.shape), self.stride(), self.dtype, self.requires_grad)
        return reduce(self, protocol)

    torch.Tensor.__reduce_ex__ = reduce_hollow  # type: ignore[method-assign, assignment]
    torch.serialization.add_safe_globals([rebuild])
    for module in (dist, c10d, objects):
        for name in OBJECTS:
            if function := getattr(module, name, None):
                setattr(module, name, _with_data(function))


def rebuild(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, requires_grad: bool
) -> torch.Tensor:
    """Returns a hollow tensor that was pickled as its layout."""
    return reserve(size, stride, dtype).requires_grad_(requires_grad)


def _with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, while which runs no new tensor is hollow."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with memory.computed():
            return function(*args, **named)

    return call
