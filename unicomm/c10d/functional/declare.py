"""Declares rows of table.py as operators `torch.ops.unicomm.*`; makes functions that call them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from unicomm.c10d import compat
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.properties import CONSTANT

from .kernels import communicator
from .table import FunctionalOp

#: Methods of a communicator that methods.py has in a form that torch.compile can trace.
TRACED = (
    *("all_gather_single", "all_reduce", "all_to_all_single", "all_to_all_v_single", "barrier", "broadcast"),
    *("gather_single", "recv", "reduce", "reduce_scatter_single", "scatter", "send"),
)

_library: Any = torch.library.Library("unicomm", "DEF")  # type: ignore[no-untyped-call]


def _place_of_communicator(comm: Communicator) -> list[int]:
    """What a graph takes as constants of a communicator: for another one, torch.compile looks again."""
    return [comm.get_rank(), comm.get_size()]


def _place_of_group(group: dist.ProcessGroup) -> list[int]:
    return [group.rank(), group.size()]


_comm = compat.register_custom_class(Communicator, CONSTANT, TRACED, guard=_place_of_communicator)
if _comm is None:
    raise UnsupportedError(
        f"torch {torch.__version__} takes no objects as arguments of custom operators",
        hint="update torch; without torch.compile call the communicator's methods",
    )
_group = compat.register_process_groups(UnicommProcessGroup, guard=_place_of_group)
#: Names in schemas: of communicators, and of process groups (None where torch's operators do not take them).
COMMUNICATOR, GROUP = _comm, _group
_TYPES = {"": _group or _comm, ".comm": _comm}


def define(name: str, row: FunctionalOp) -> None:
    """Declares the operator `unicomm::name` with an overload for groups and one for communicators."""
    compat.not_traced([row.kernel])
    for overload, group_type in _TYPES.items():
        full = name + overload
        arguments = ", ".join(filter(None, [row.tensor, row.arguments, f"{group_type} group"]))
        declare(f"{full}({arguments}) -> {row.result}", row.kernel, row.shape or (lambda *_: None))
        if row.gradient is not None:
            _differentiate(full, row)
        if row.keep:
            torch.fx.node.has_side_effect(
                getattr(getattr(torch.ops.unicomm, name), overload[1:] or "default")
            )


def declare(schema: str, kernel: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Declares one operator of the namespace `unicomm`."""
    full = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(full, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"unicomm::{full}", shape, lib=_library, allow_override=False)


def expand_in_graphs(name: str, kernel: Callable[..., Any]) -> None:
    """Has graphs contain the operators that `kernel` calls, in place of the operator `unicomm::name`."""

    def expand(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with mode:
            return kernel(*args, **(kwargs or {}))

    for overload in _TYPES:
        full = f"unicomm::{name}{overload}"
        torch.library.register_torch_dispatch(full, ProxyTorchDispatchMode, expand, lib=_library)


def _differentiate(full: str, row: FunctionalOp) -> None:
    gradient = row.gradient
    assert gradient is not None
    many = row.tensor.startswith("Tensor[]")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, *ctx.arguments = inputs
        ctx.shape = [t.shape for t in tensors] if many else tensors.shape

    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        return (gradient(grad, ctx.shape, *ctx.arguments), *[None] * len(ctx.arguments))

    torch.library.register_autograd(f"unicomm::{full}", backward, setup_context=setup_context, lib=_library)


def function(name: str, row: FunctionalOp) -> Callable[..., Any]:
    """Returns the function of `unicomm.functional` that calls the operator."""
    packet = getattr(torch.ops.unicomm, name)
    many = row.tensor.startswith("Tensor[]")

    def call(*arguments: Any, **named: Any) -> Any:
        return packet(*arguments, **named)

    def call_with_communicator(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(call).bind(*arguments, **named)
        first, group = next(iter(bound.arguments.values())), bound.arguments.get("group")
        if isinstance(group, dist.ProcessGroup):
            bound.arguments["group"] = communicator(group, (first[0] if many else first).device)
        return packet(*bound.args, **bound.kwargs)

    describe(call, name, row)
    return call if GROUP is not None else functools.wraps(call)(call_with_communicator)


def describe(call: Any, name: str, row: FunctionalOp, but: tuple[str, ...] = ()) -> None:
    """Gives a function the name, docstring and parameters of an operator, without the parameters in `but`."""
    call.__name__ = call.__qualname__ = name
    call.__module__ = "unicomm.c10d.functional"
    schema = compat.schema_of(getattr(torch.ops.unicomm, name).default)
    call.__doc__ = f"{row.doc}\n\n    torch.ops.{schema}"
    call.__signature__ = inspect.Signature(
        [
            inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for a in schema.arguments
            if a.name not in but
        ]
    )
