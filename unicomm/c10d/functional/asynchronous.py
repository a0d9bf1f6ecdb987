"""Asynchronous forms of the functional collectives: started where they are called, waited for where used.

    y = unicomm.functional.all_reduce_async(x, "sum", group)     # started
    z = model(w)                                                 # runs meanwhile
    z + y                                                        # waits here

Eager results are torch's `AsyncCollectiveTensor`, which waits at its first use. In a graph, each operator
here becomes torch's own (`_c10d_functional`) and a `wait_tensor`, because Inductor moves these and no others.
A communicator takes part by a process group over it, which the operator `unicomm::group_of` gives.
Values and gradients are those of the synchronous forms; gradients are asynchronous inside, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from unicomm.c10d import compat
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import UnsupportedError

from .declare import COMMUNICATOR, GROUP, declare, define, describe, expand_in_graphs
from .kernels import Group, Tensor, as_input, check_rows, group_size, operator, reduction
from .table import OPS, FunctionalOp

_native = compat.functional_collectives
_OWN_GROUP = "_group_of_functional"  # attribute of a communicator


def _group_of(group: Group) -> dist.ProcessGroup:
    """Returns the process group of the asynchronous forms: one over a communicator, or `group` itself."""
    comm: Group = compat.real_object(group)
    if not isinstance(comm, Communicator):
        return comm
    # On the communicator, which it holds: anything that outlives both would keep them for good.
    made: dist.ProcessGroup | None = getattr(comm, _OWN_GROUP, None)
    if made is None:
        made = UnicommProcessGroup(comm)
        setattr(comm, _OWN_GROUP, made)
    return made


def _process_group(group: Group) -> Any:
    # An operator also for process groups: torch's operators take them as `Any`, and an input of the
    # graph would become a constant.
    return operator("group_of", group)(group)


# --- kernels: each starts a collective, whose result is valid after `wait_tensor` ---------------------------


def _all_reduce(x: Tensor, op: str, group: Group) -> Any:
    reduction(op)
    return _native.all_reduce(as_input(x), op.lower(), _process_group(group))


def _broadcast(x: Tensor, root: int, group: Group) -> Any:
    return _native.broadcast(as_input(x), root, _process_group(group))


def _all_gather_single(x: Tensor, group: Group) -> Any:
    return _native.all_gather_into_tensor(as_input(x), group_size(group), _process_group(group))


def _reduce_scatter_single(x: Tensor, op: str, group: Group) -> Any:
    reduction(op)
    check_rows("reduce_scatter_single_async", x, group)
    return _native.reduce_scatter_tensor(as_input(x), op.lower(), group_size(group), _process_group(group))


def _all_to_all_single(x: Tensor, group: Group) -> Any:
    check_rows("all_to_all_single_async", x, group)
    n = group_size(group)
    equal = [x.shape[0] // n] * n
    return _native.all_to_all_single(as_input(x), equal, equal, _process_group(group))


def _all_to_all_v_single(x: Tensor, output_splits: Any, input_splits: Any, group: Group) -> Any:
    return _native.all_to_all_single(
        as_input(x), list(output_splits), list(input_splits), _process_group(group)
    )


_KERNELS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather_single": _all_gather_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_v_single": _all_to_all_v_single,
}


# --- operators ----------------------------------------------------------------------------------------------


def _asynchronous(name: str, group: Group) -> Callable[..., Any]:
    """Returns the operator `name` for gradients: its asynchronous form, if any, and the wait for it."""
    if name not in _KERNELS:
        return operator(name, group)  # type: ignore[no-any-return]
    start = operator(f"{name}_async", group)
    return lambda *arguments: _native.wait_tensor(start(*arguments))


def _row(name: str, kernel: Callable[..., Any]) -> FunctionalOp:
    one = OPS[name]
    assert one.gradient is not None
    return replace(
        one,
        kernel=kernel,
        gradient=functools.partial(one.gradient, find=_asynchronous),
        doc=f"`{name}`, started here and waited for where the result is used.",
    )


ASYNC_OPS = {f"{name}_async": _row(name, kernel) for name, kernel in _KERNELS.items()}


def _function(name: str, row: FunctionalOp) -> Callable[..., Any]:
    if GROUP is None:

        def call(*arguments: Any, **named: Any) -> Any:
            raise UnsupportedError(
                f"torch {torch.__version__} takes no process groups as arguments of operators",
                hint=f"call unicomm.functional.{name.removesuffix('_async')}, or update torch",
            )

    else:
        packet, waiting = getattr(torch.ops.unicomm, name), compat.wait_at_first_use()

        def call(*arguments: Any, **named: Any) -> Any:
            return waiting(packet(*arguments, **named))

    describe(call, name, row)
    return call


def declare_all() -> dict[str, Callable[..., Any]]:
    """Declares the asynchronous operators; returns their functions by name."""
    if GROUP is not None:
        declare(f"group_of({GROUP} group) -> {GROUP}", _group_of, _group_of)
        declare(f"group_of.comm({COMMUNICATOR} group) -> {GROUP}", _group_of, _group_of)
    for name, row in ASYNC_OPS.items():
        define(name, row)
        if GROUP is not None:
            expand_in_graphs(name, row.kernel)
    return {name: _function(name, row) for name, row in ASYNC_OPS.items()}
