"""What an operation does with hollow tensors: the shapes of its results, and whether it really runs.

Shapes, strides and dtypes come from torch's own rules for fake tensors, once for each kind of call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import NO_LAYOUT, OpOverload, fake_mode, fake_tensor, tree_leaves, tree_map
from ..places import user_place
from .memory import is_hollow, is_large

#: Namespaces of operations that consist of others: they run, and the others are answered one by one.
_MADE_OF_OTHERS = {
    *("_c10d_functional", "_c10d_functional_autograd", "c10d", "fsdp", "unicomm", "_dtensor", "symm_mem")
}


class Way(enum.Enum):
    """How an operation is answered."""

    RUN = "it runs, as nothing of it touches large memory"
    DECOMPOSE = "its parts are answered"
    ASK = "it depends on the call"


@dataclass(frozen=True)
class Operation:
    """What an operation's schema says.

    Attributes:
        written: the positions or names of arguments that it writes.
        returns: for each result, which argument it is, or None for a new tensor.
        single: whether it returns one value instead of a tuple.
        is_out: whether written arguments have no values before.
    """

    way: Way
    written: tuple[int | str, ...] = ()
    returns: tuple[int | str | None, ...] = ()
    single: bool = False
    is_out: bool = False


@dataclass(frozen=True)
class Result:
    """The layout of a result."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    large: bool


class NotKnownError(RuntimeError):
    """An operation needs values of a hollow tensor, so that the program cannot be rehearsed with `--meta`.

    `what`: depends on these values. `cure`: what to do.
    """

    CAUSE = "depends on values of a large tensor, which --meta does not compute"

    def __init__(self, what: str, cure: str = "rehearse a smaller model without --meta") -> None:
        place = user_place()
        super().__init__(f"{what} {self.CAUSE}: {cure}{place and f' ({place})'}")


_operations: dict[OpOverload, Operation] = {}


def operation_of(func: OpOverload) -> Operation:
    """Returns what the schema of an operation says."""
    found = _operations.get(func)
    if found is None:
        found = _operations[func] = _read(func)
    return found


def _read(func: OpOverload) -> Operation:
    namespace = func.namespace
    if namespace in _MADE_OF_OTHERS:
        return Operation(Way.DECOMPOSE)
    if func.is_view or torch.Tag.inplace_view in func.tags or namespace == "prim":
        return Operation(Way.RUN)
    if func._can_decompose():
        return Operation(Way.DECOMPOSE)
    schema = func._schema
    by_alias: dict[str, int | str] = {}
    written: list[int | str] = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            place = argument.name if argument.kwarg_only else at
            written.append(place)
            by_alias[str(sorted(argument.alias_info.before_set))] = place
    returns = tuple(
        None if one.alias_info is None else by_alias.get(str(sorted(one.alias_info.before_set)))
        for one in schema.returns
    )
    tensors = all("Tensor" in str(one.type) for one in schema.returns)
    if not tensors:
        return Operation(Way.RUN)
    is_out = any(argument.is_out for argument in schema.arguments)
    return Operation(Way.ASK, tuple(written), returns, len(returns) == 1, is_out)


Key = tuple[Any, ...]


def describe(values: Sequence[Any]) -> tuple[Key, bool]:
    """Returns what of the arguments decides about the results, and whether one of them is hollow."""
    found: list[Any] = []
    hollow = False
    for value in values:
        if isinstance(value, torch.Tensor):
            here = is_hollow(value)
            hollow = hollow or here
            found.append((value.shape, value.stride(), value.dtype, value.device.type, here))
        elif isinstance(value, (list, tuple)):
            inner, there = describe(value)
            hollow = hollow or there
            found.append(inner)
        else:
            found.append((value, value.__class__))
    return tuple(found), hollow


#: The results of one kind of call; None if the operation has to run.
Plan = Sequence[Any] | None
_plans: dict[Key, Plan] = {}
_fake: Any = None  # torch's mode, when it is needed first


def plan(
    func: OpOverload, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Plan, bool]:
    """Returns the layouts of an operation's results, None if it runs; and whether it gets hollow tensors.

    Raises `NotKnownError` if the results depend on values of a hollow tensor, and what torch raises for
    arguments that do not fit together.
    """
    inner, hollow = describe(args)
    if kwargs:
        more, there = describe(tuple(kwargs.values()))
        hollow = hollow or there
        key: Key = (func, inner, tuple(kwargs), more)
    else:
        key = (func, inner)
    try:
        return _plans[key], hollow
    except KeyError:
        pass
    except TypeError:  # an argument that is no value, such as a generator of random numbers
        return _propagate(func, operation, args, kwargs, hollow), hollow
    found = _plans[key] = _propagate(func, operation, args, kwargs, hollow)
    return found, hollow


def _propagate(
    func: OpOverload, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any], hollow: bool
) -> Plan:
    if operation.written and not hollow:
        return None
    global _fake
    mode = _fake = _fake or fake_mode()

    def fake(value: Any) -> Any:
        return fake_tensor(mode, value) if isinstance(value, torch.Tensor) else value

    try:
        fakes, named = tree_map(fake, (list(args), dict(kwargs)))
        with mode:
            results = func(*fakes, **named)
    except NO_LAYOUT:
        if hollow:
            raise NotKnownError(f"the shape of the result of {func!s}") from None
        return None
    except Exception:
        if hollow:
            raise
        return None  # the operation itself says it
    if operation.single:
        results = (results,)
    elif results is None:
        results = ()
    found = [
        None if place is not None else tree_map(_result, one)
        for place, one in zip(operation.returns, results, strict=True)
    ]
    flat = [one for one in tree_leaves(found) if isinstance(one, Result)]
    if any(one is _ELSEWHERE for one in tree_leaves(found)):
        return None
    if not hollow and not any(one.large for one in flat):
        return None
    return found


_ELSEWHERE = object()


def _result(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "cpu" or value.layout is not torch.strided:
        return _ELSEWHERE
    size, stride = tuple(value.shape), tuple(value.stride())
    return Result(size, stride, value.dtype, is_large(size, stride, value.dtype))
