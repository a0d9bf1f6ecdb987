"""Collectives as functions: a tensor in, a new tensor out, differentiable, and one node of a compiled graph.

    y = unicomm.functional.all_reduce(x, "sum", group)        # is torch.ops.unicomm.all_reduce
    torch.compile(f, fullgraph=True)                          # `group` is an input of the graph

`group` is a `Communicator`, or a `ProcessGroup` over communicators. Each operator has two overloads, one for
either; torch 2.11 takes no process groups there, and the functions here pass on their communicator.
They are synchronous: what they return may be used at once (on a device in stream order).

Every operator has a kernel, a shape function for tracing, and, where the result depends on the input
smoothly, a gradient. A gradient is what the chain rule gives when the losses of all ranks are added: that of
`all_reduce` by "sum" is the sum of all ranks' gradients. All ranks must therefore run the same backward.

Left out, because their results have other shapes on the root than elsewhere, which a graph that all ranks
share cannot say: gather and scatter. A barrier has no result to depend on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from unicomm.comms.communicator import CONSTANT, Communicator

from . import functional_rules as rules
from . import opaque
from .functional_rules import communicator, group_size

# --- operators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionalOp:
    """An operator: `arguments` between the tensor and the group, in the syntax of torch's schemas."""

    arguments: str
    kernel: Callable[..., Any]
    shape: Callable[..., Any] | None
    gradient: Callable[..., Any] | None = None
    tensor: str = "Tensor input"
    result: str = "Tensor"
    doc: str = ""


_LIST: Any = {"tensor": "Tensor[] inputs", "result": "Tensor[]"}
_IN_PLACE: Any = {"tensor": "Tensor(a!) input", "result": "()"}

OPS: dict[str, FunctionalOp] = {
    "all_reduce": FunctionalOp(
        "str op", rules.all_reduce, rules.like, rules.d_all_reduce, doc="Reduction of all ranks' `input`."
    ),
    "broadcast": FunctionalOp(
        "int root", rules.broadcast, rules.like, rules.d_broadcast, doc="The root's `input`."
    ),
    "reduce": FunctionalOp(
        "int root, str op",
        rules.reduce,
        rules.like,
        rules.d_reduce,
        doc="On the root the reduction of all ranks' `input`, elsewhere `input`.",
    ),
    "all_gather_single": FunctionalOp(
        "",
        rules.all_gather_single,
        rules.gathered_like,
        rules.d_all_gather_single,
        doc="All ranks' `input` one after the other along the first dimension.",
    ),
    "reduce_scatter_single": FunctionalOp(
        "str op",
        rules.reduce_scatter_single,
        rules.scattered_like,
        rules.d_reduce_scatter_single,
        doc="This rank's part, along the first dimension, of the reduction of all ranks' `input`.",
    ),
    "all_to_all_single": FunctionalOp(
        "",
        rules.all_to_all_single,
        rules.like,
        rules.d_all_to_all_single,
        doc="Part i of the result is this rank's part of rank i's `input`; parts are equal.",
    ),
    "all_to_all_v_single": FunctionalOp(
        "SymInt[] output_splits, SymInt[] input_splits",
        rules.all_to_all_v_single,
        rules.v_like,
        rules.d_all_to_all_v_single,
        doc="`all_to_all_single` whose parts have the given numbers of rows.",
    ),
    "permute": FunctionalOp(
        "int[] destinations",
        rules.permute,
        rules.like,
        rules.d_permute,
        doc="Rank r's `input` becomes the result of rank `destinations[r]`.",
    ),
    "all_reduce_coalesced": FunctionalOp(
        "str op",
        rules.all_reduce_coalesced,
        rules.likes,
        rules.each(rules.d_all_reduce),
        doc="`all_reduce` of each tensor.",
        **_LIST,
    ),
    "all_gather_single_coalesced": FunctionalOp(
        "",
        rules.all_gather_single_coalesced,
        lambda xs, group: [rules.gathered_like(x, group) for x in xs],
        rules.each(rules.d_all_gather_single),
        doc="`all_gather_single` of each tensor.",
        **_LIST,
    ),
    "reduce_scatter_single_coalesced": FunctionalOp(
        "str op",
        rules.reduce_scatter_single_coalesced,
        lambda xs, op, group: [rules.scattered_like(x, op, group) for x in xs],
        rules.each(rules.d_reduce_scatter_single),
        doc="`reduce_scatter_single` of each tensor.",
        **_LIST,
    ),
    "all_reduce_": FunctionalOp(
        "str op", rules.all_reduce_, None, doc="`all_reduce` into `input` itself; no gradient.", **_IN_PLACE
    ),
    "broadcast_": FunctionalOp(
        "int root", rules.broadcast_, None, doc="`broadcast` into `input` itself; no gradient.", **_IN_PLACE
    ),
}

_library: Any = torch.library.Library("unicomm", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, row: FunctionalOp, overload: str, group_type: str) -> None:
    full = name + overload
    arguments = ", ".join(filter(None, [row.tensor, row.arguments, f"{group_type} group"]))
    _library.define(f"{full}({arguments}) -> {row.result}")
    _library.impl(full, row.kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"unicomm::{full}", row.shape or (lambda *_: None), lib=_library, allow_override=False
    )
    gradient = row.gradient
    if gradient is None:
        return
    many = row.tensor.startswith("Tensor[]")

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, *ctx.arguments = inputs
        ctx.shape = [t.shape for t in tensors] if many else tensors.shape

    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        return (gradient(grad, ctx.shape, *ctx.arguments), *[None] * len(ctx.arguments))

    torch.library.register_autograd(f"unicomm::{full}", backward, setup_context=setup_context, lib=_library)


def _function(name: str, row: FunctionalOp) -> Callable[..., Any]:
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

    call.__name__ = call.__qualname__ = name
    schema = packet.default._schema
    call.__doc__ = f"{row.doc}\n\n    torch.ops.{schema}"
    parameters = [
        inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in schema.arguments
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call if _TAKES_GROUPS else functools.wraps(call)(call_with_communicator)


# torch itself registers ProcessGroup no earlier than it needs it.
_register = getattr(device_mesh, "_register_distributed_opaque_types", None)
_TAKES_GROUPS = _register is not None
_comm = opaque.register(Communicator, CONSTANT)
_TYPES = {"": _comm, ".comm": _comm}
if _register is not None:
    _register()
    _TYPES[""] = f"{dist.ProcessGroup.__module__}.{dist.ProcessGroup.__qualname__}"
opaque.not_traced(row.kernel for row in OPS.values())
for _name, _row in OPS.items():
    for _overload, _type in _TYPES.items():
        _define(_name, _row, _overload, _type)
    globals()[_name] = _function(_name, _row)

__all__ = ["OPS", "FunctionalOp", "communicator", "group_size"]
__all__ += OPS  # noqa: PLE0605
