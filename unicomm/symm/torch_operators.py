"""Lists which operations of `torch.ops.symm_mem` run on CPU tensors, and why others do not.

The list depends on torch: each release declares further operations, and may change the schema of one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

import unicomm
from unicomm.c10d import compat
from unicomm.comms.errors import NotReadyError, UnsupportedError
from unicomm.extensions.torch_extensions import SYMMETRIC_MEMORY, load

_NAMESPACE = "symm_mem"
#: Operations whose own kernels in torch take any memory.
_OF_TORCH = ("_barrier", "_rendezvous")


class TorchOperator(NamedTuple):
    """An operation of `torch.ops.symm_mem`. `text` says how it runs on CPU tensors, or why it does not."""

    name: str
    served: bool
    text: str


def torch_operators() -> list[TorchOperator]:
    """Returns all operations that this torch declares in `torch.ops.symm_mem`, by name.

    An operation that is not served raises `UnsupportedError` with the same reason when it is called on CPU
    tensors. Raises `NotReadyError` when the extension is not built for this torch. Changes nothing in torch.
    """
    compat.symmetric_memory()  # declares some of them
    unit = load_unit()
    return [_look_at(name, unit) for name in compat.operators_of(_NAMESPACE)]


def load_unit() -> ModuleType:
    """Returns the extension for this torch. Raises `NotReadyError` when it is not built."""
    unit = load(SYMMETRIC_MEMORY)
    if unit is None:
        raise NotReadyError(
            f"torch's symmetric memory is not built for torch {torch.__version__}",
            hint="run `unicomm build torch-bridge`, which needs a C++ compiler",
        )
    return unit


def known_operators(unit: ModuleType) -> dict[str, str]:
    """Returns the operations that have a kernel, declared by this torch or not, and how each runs."""
    from .torch_kernels import KERNELS

    known = {name: _how(name) for name in unit.operators()}
    return (
        known | {name: kernel.text for name, kernel in KERNELS.items()} | dict.fromkeys(_OF_TORCH, "by torch")
    )


def register(unit: ModuleType) -> torch.library.Library:
    """Registers the kernels written in Python, and an error for each operation that has no kernel.

    Call it after the extension has registered its own kernels.
    """
    from .torch_kernels import KERNELS

    library = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name in compat.operators_of(_NAMESPACE):
        found = _look_at(name, unit)
        if not found.served:
            _implement(library, name, functools.partial(_refuse, found))
        elif name in KERNELS:
            _implement(library, name, KERNELS[name].run)
    return library


def _implement(library: torch.library.Library, name: str, run: Callable[..., Any]) -> None:
    takes_tensors = any("Tensor" in str(argument.type) for argument in _schema(name).arguments)
    key = "CPU" if takes_tensors else "CompositeExplicitAutograd"
    if not compat.has_kernel(f"{_NAMESPACE}::{name}", key):
        library.impl(name, run, key)  # type: ignore[no-untyped-call]


def _schema(name: str) -> Any:
    return compat.declared_schema(f"{_NAMESPACE}::{name}")


def _look_at(name: str, unit: ModuleType) -> TorchOperator:
    from .torch_kernels import KERNELS

    known = known_operators(unit)
    if name not in known:
        return TorchOperator(name, False, f"unicomm {unicomm.__version__} does not know it")
    why = unit.operators().get(name, "")
    if name in KERNELS and not _fits(KERNELS[name].run, name):
        why = f"this torch declares it otherwise: {_schema(name)}"
    return TorchOperator(name, not why, why or known[name])


def _fits(kernel: Callable[..., Any], name: str) -> bool:
    """Whether a kernel in Python takes the arguments that torch declares."""
    parameters = inspect.signature(kernel).parameters.values()
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    arguments = _schema(name).arguments
    return len(parameters) == len(arguments) and [a.name for a in arguments if a.kwarg_only] == named


def _how(name: str) -> str:
    multicast = name.startswith("multimem_") or "multicast" in name
    return "in shared memory, without multicast" if multicast else "in shared memory"


def _refuse(operator: TorchOperator, *args: object, **kwargs: object) -> None:
    raise UnsupportedError(
        f"torch.ops.{_NAMESPACE}.{operator.name} does not run on CPU tensors: {operator.text}",
        op=operator.name,
        hint="unicomm.symm.torch_operators() lists those that do",
    )
