"""Which operations of `torch.ops.symm_mem` run on CPU tensors here, and why others do not.

What they are depends on torch: each release declares some more, and may declare one otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

import unicomm
from unicomm.comms.errors import NotReadyError, UnsupportedError
from unicomm.extensions.torch_extensions import SYMMETRIC_MEMORY, load

_NAMESPACE = "symm_mem"
#: torch's own, which takes any memory.
_OF_TORCH = ("_barrier", "_rendezvous")


class TorchOperator(NamedTuple):
    """An operation of `torch.ops.symm_mem`: how it runs on CPU tensors, or why it does not."""

    name: str
    served: bool
    text: str


def torch_operators() -> list[TorchOperator]:
    """All operations that this torch declares in `torch.ops.symm_mem`, by name.

    One that is not served raises `UnsupportedError` with the same reason when it is called on CPU tensors.
    Raises `NotReadyError` where the extension is not built for this torch. It changes nothing in torch.
    """
    from torch.distributed import _symmetric_memory  # noqa: F401 - it declares some of them

    unit = load_unit()
    return [_look_at(name, unit) for name in _declared()]


def load_unit() -> ModuleType:
    """The extension for this torch. Raises `NotReadyError`."""
    unit = load(SYMMETRIC_MEMORY)
    if unit is None:
        raise NotReadyError(
            f"torch's symmetric memory is not built for torch {torch.__version__}",
            hint="run `unicomm build torch-bridge`, which needs a C++ compiler",
        )
    return unit


def known_operators(unit: ModuleType) -> dict[str, str]:
    """What there is a kernel for, declared by this torch or not, and how it runs."""
    from .torch_kernels import KERNELS

    known = {name: _how(name) for name in unit.operators()}
    return (
        known | {name: kernel.text for name, kernel in KERNELS.items()} | dict.fromkeys(_OF_TORCH, "by torch")
    )


def register(unit: ModuleType) -> torch.library.Library:
    """Gives torch the kernels that are in Python, and an error for each operation that has none.

    To be called after the extension has given it its own.
    """
    from .torch_kernels import KERNELS

    library = torch.library.Library(_NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name in _declared():
        found = _look_at(name, unit)
        if not found.served:
            _implement(library, name, functools.partial(_refuse, found))
        elif name in KERNELS:
            _implement(library, name, KERNELS[name].run)
    return library


def _implement(library: torch.library.Library, name: str, run: Callable[..., Any]) -> None:
    key = "CPU" if _takes_tensors(name) else "CompositeExplicitAutograd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{_NAMESPACE}::{name}", key):
        library.impl(name, run, key)  # type: ignore[no-untyped-call]


def _declared() -> list[str]:
    prefix = f"{_NAMESPACE}::"
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _schema(name: str) -> Any:
    base, _, overload = name.partition(".")
    return torch._C._get_schema(f"{_NAMESPACE}::{base}", overload)


def _takes_tensors(name: str) -> bool:
    return any("Tensor" in str(argument.type) for argument in _schema(name).arguments)


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
    """Whether a kernel in Python takes what torch declares."""
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
        hint="unicomm.symm.torch_operators() lists what does",
    )
