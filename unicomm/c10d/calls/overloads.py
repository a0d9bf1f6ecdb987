"""The forms in which torch's process groups take their arguments.

Each method of `dist.ProcessGroup` takes lists of tensors and an options object, and most also take a tensor
itself with root, reduction and timeout: `group.reduce(tensor, root=0)`. The methods of unicomm's groups are
written for the first form; `first_form` turns the second into it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from .table import METHODS

_SETTINGS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def first_form(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of method `name` in torch's first form: lists of tensors, then options.

    `given`, `named`: positional and keyword arguments of the call, in either form. Root, reduction and
    timeout become options. Raises `TypeError` if an argument is missing, unknown or given twice.
    """
    row = METHODS[name]
    names, told = row.second_form, None
    if given and (hasattr(given[-1], "asyncOp") or given[-1] is None):
        given, told = given[:-1], given[-1]  # options, of whatever class
    named = {row.renamed.get(key, key): value for key, value in named.items()}
    values = dict(zip(names, given, strict=False)) | named
    unknown = [key for key in values if key not in names]
    if unknown or len(given) > len(names) or len(values) < len(given) + len(named):
        raise TypeError(f"{name}() takes {', '.join(names)}, each once, or lists of tensors and opts")
    needed = [key for key in names if key not in ("op", "timeout") and not (told and key == "root")]
    if missing := [key for key in needed if key not in values]:
        raise TypeError(f"{name}() needs {' and '.join(missing)}")
    if told is None:
        told = row.options()
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
