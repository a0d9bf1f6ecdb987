"""The forms in which torch's process groups take their arguments.

Each method of `dist.ProcessGroup` takes lists of tensors and an options object, and most also take a tensor
itself with root, reduction and timeout: `group.reduce(tensor, root=0)`. The methods of unicomm's groups are
written for the first form; `first_form` turns the second into it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .compat import AllgatherOptions


class Forms(NamedTuple):
    """How a method may be called.

    `options`: the class of its options. `names`: the arguments of the second form, in torch's order.
    `aliases`: names of the first form where they are others.
    """

    options: Any
    names: tuple[str, ...]
    aliases: dict[str, str]


FORMS = {
    "allreduce": Forms(dist.AllreduceOptions, ("tensor", "op", "timeout"), {"tensors": "tensor"}),
    "reduce": Forms(dist.ReduceOptions, ("tensor", "root", "op", "timeout"), {"tensors": "tensor"}),
    "broadcast": Forms(dist.BroadcastOptions, ("tensor", "root", "timeout"), {"tensors": "tensor"}),
    "allgather": Forms(
        AllgatherOptions,
        ("output_tensors", "input_tensor", "timeout"),
        {"input_tensors": "input_tensor"},
    ),
    "gather": Forms(
        dist.GatherOptions,
        ("output_tensors", "input_tensor", "root", "timeout"),
        {"input_tensors": "input_tensor"},
    ),
    "scatter": Forms(
        dist.ScatterOptions,
        ("output_tensor", "input_tensors", "root", "timeout"),
        {"output_tensors": "output_tensor"},
    ),
    "reduce_scatter": Forms(
        dist.ReduceScatterOptions,
        ("output", "input", "op", "timeout"),
        {"output_tensors": "output", "input_tensors": "input"},
    ),
    "alltoall_base": Forms(
        dist.AllToAllOptions,
        ("output", "input", "output_split_sizes", "input_split_sizes", "timeout"),
        {},
    ),
    "barrier": Forms(dist.BarrierOptions, ("timeout",), {}),
}
_SETTINGS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def first_form(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of method `name` in torch's first form: lists of tensors, then options.

    `given`, `named`: positional and keyword arguments of the call, in either form. Root, reduction and
    timeout become options. Raises `TypeError` if an argument is missing, unknown or given twice.
    """
    options, names, aliases = FORMS[name]
    told = None
    if given and (hasattr(given[-1], "asyncOp") or given[-1] is None):
        given, told = given[:-1], given[-1]  # options, of whatever class
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
    return (*tensors, told)


def _duration(value: Any) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)
