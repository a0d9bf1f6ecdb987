"""The forms in which torch's process groups take their arguments.

Each method of `dist.ProcessGroup` takes lists of tensors and an options object, and most also take a tensor
itself with root, reduction and timeout: `group.reduce(tensor, root=0)`. The methods of unicomm's groups are
written for the first form; `both_forms` lets them take the second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .compat import AllgatherOptions

Method = TypeVar("Method", bound=Callable[..., Any])

# By method: the options, the names of the second form in torch's order, and those of the first where another.
_FORMS: dict[str, tuple[Any, tuple[str, ...], dict[str, str]]] = {
    "allreduce": (dist.AllreduceOptions, ("tensor", "op", "timeout"), {"tensors": "tensor"}),
    "reduce": (dist.ReduceOptions, ("tensor", "root", "op", "timeout"), {"tensors": "tensor"}),
    "broadcast": (dist.BroadcastOptions, ("tensor", "root", "timeout"), {"tensors": "tensor"}),
    "allgather": (
        AllgatherOptions,
        ("output_tensors", "input_tensor", "timeout"),
        {"input_tensors": "input_tensor"},
    ),
    "gather": (
        dist.GatherOptions,
        ("output_tensors", "input_tensor", "root", "timeout"),
        {"input_tensors": "input_tensor"},
    ),
    "scatter": (
        dist.ScatterOptions,
        ("output_tensor", "input_tensors", "root", "timeout"),
        {"output_tensors": "output_tensor"},
    ),
    "reduce_scatter": (
        dist.ReduceScatterOptions,
        ("output", "input", "op", "timeout"),
        {"output_tensors": "output", "input_tensors": "input"},
    ),
    "alltoall_base": (
        dist.AllToAllOptions,
        ("output", "input", "output_split_sizes", "input_split_sizes", "timeout"),
        {},
    ),
    "barrier": (dist.BarrierOptions, ("timeout",), {}),
}
_SETTINGS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def both_forms(name: str) -> Callable[[Method], Method]:
    """Lets a method, written for torch's first form of `name`, take the second as well."""
    options, names, aliases = _FORMS[name]

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def either(self: Any, *given: Any, opts: Any = None, **named: Any) -> Any:
            if not named:
                if opts is not None:
                    return method(self, *given, opts)
                if given and (given[-1].__class__ is options or given[-1] is None):
                    return method(self, *given)
            return method(self, *_first_form(name, options, names, aliases, given, opts, named))

        return either  # type: ignore[return-value]

    return decorate


def _first_form(
    name: str,
    options: Any,
    names: tuple[str, ...],
    aliases: dict[str, str],
    given: tuple[Any, ...],
    told: Any,
    named: dict[str, Any],
) -> list[Any]:
    """Returns the arguments in torch's first form; those that are not tensors become options."""
    if given and hasattr(given[-1], "asyncOp"):  # options, of whatever class
        given, told = given[:-1], given[-1]
    named = {aliases.get(key, key): value for key, value in named.items()}
    values = dict(zip(names, given, strict=False)) | named
    unknown = [key for key in values if key not in names]
    if unknown or len(given) > len(names) or len(values) < len(given) + len(named):
        raise TypeError(f"{name}() takes {', '.join(names)}, each once, or lists of tensors and opts")
    needed = [key for key in names if key not in ("op", "timeout") and not (told and key == "root")]
    if missing := [key for key in needed if key not in values]:
        raise TypeError(f"{name}() needs {' and '.join(missing)}")
    if told is None:
        told = options()
    for key, attribute in _SETTINGS.items():
        if key in values and values[key] is not None:
            value = values.pop(key)
            setattr(told, attribute, _duration(value) if key == "timeout" else value)
    tensors = [values[key] for key in names if key not in _SETTINGS]
    if any(isinstance(value, torch.Tensor) for value in tensors) and name != "alltoall_base":
        # One tensor is a list of one, and the list beside it is the list of its parts.
        tensors = [[value] for value in tensors]
    return [*tensors, told]


def _duration(value: Any) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)
