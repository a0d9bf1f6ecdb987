"""Collectives as differentiable functions that take a tensor and return a new one.

    y = unicomm.functional.all_reduce(x, "sum", group)        # is torch.ops.unicomm.all_reduce
    torch.compile(f, fullgraph=True)                          # `group` is an input of the graph

`group` is a `Communicator` or a `ProcessGroup` over communicators. Each operator has an overload for either.
With torch 2.11, whose operators take no process groups, the functions here pass the group's communicator.
The functions are synchronous: their results may be used at once (on a device in stream order).

Every operator has a kernel, a shape function for tracing, and, if the result depends smoothly on the input, a
gradient (functional_kernels.py). A gradient follows from the chain rule for the sum of the losses of all
ranks: the gradient of `all_reduce` by "sum" is the sum of all ranks' gradients. All ranks must therefore run
the same backward.

There is no gather and no scatter: their results have a different shape on the root, which a graph shared by
all ranks cannot express. There is no barrier: it has no result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.properties import CONSTANT

from . import compat
from . import functional_kernels as kernels
from .functional_kernels import communicator, group_size

# --- operators ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionalOp:
    """An operator. `arguments` stand between the tensor and the group, in the syntax of torch's schemas."""

    arguments: str
    kernel: Callable[..., Any]
    shape: Callable[..., Any] | None
    gradient: Callable[..., Any] | None = None
    tensor: str = "Tensor input"
    result: str = "Tensor"
    doc: str = ""


_IN_PLACE: Any = {"tensor": "Tensor(a!) input", "result": "()"}

OPS: dict[str, FunctionalOp] = {
    "all_reduce": FunctionalOp(
        "str op",
        kernels.all_reduce,
        kernels.like,
        kernels.d_all_reduce,
        doc="The reduction of all ranks' `input`.",
    ),
    "broadcast": FunctionalOp(
        "int root", kernels.broadcast, kernels.like, kernels.d_broadcast, doc="The root's `input`."
    ),
    "reduce": FunctionalOp(
        "int root, str op",
        kernels.reduce,
        kernels.like,
        kernels.d_reduce,
        doc="The reduction of all ranks' `input` on the root; `input` itself on the other ranks.",
    ),
    "all_gather_single": FunctionalOp(
        "",
        kernels.all_gather_single,
        kernels.gathered_like,
        kernels.d_all_gather_single,
        doc="The `input` of all ranks, concatenated along the first dimension.",
    ),
    "reduce_scatter_single": FunctionalOp(
        "str op",
        kernels.reduce_scatter_single,
        kernels.scattered_like,
        kernels.d_reduce_scatter_single,
        doc="This rank's part, along the first dimension, of the reduction of all ranks' `input`.",
    ),
    "all_to_all_single": FunctionalOp(
        "",
        kernels.all_to_all_single,
        kernels.like,
        kernels.d_all_to_all_single,
        doc="Part i of the result is this rank's part of rank i's `input`. All parts are equal.",
    ),
    "all_to_all_v_single": FunctionalOp(
        "SymInt[] output_splits, SymInt[] input_splits",
        kernels.all_to_all_v_single,
        kernels.v_like,
        kernels.d_all_to_all_v_single,
        doc="`all_to_all_single` with the given numbers of rows for the parts.",
    ),
    "permute": FunctionalOp(
        "int[] destinations",
        kernels.permute,
        kernels.like,
        kernels.d_permute,
        doc="Rank r's `input` becomes the result of rank `destinations[r]`.",
    ),
    "all_reduce_": FunctionalOp(
        "str op", kernels.all_reduce_, None, doc="`all_reduce` into `input` itself; no gradient.", **_IN_PLACE
    ),
    "broadcast_": FunctionalOp(
        "int root", kernels.broadcast_, None, doc="`broadcast` into `input` itself; no gradient.", **_IN_PLACE
    ),
}


def _coalesced(name: str) -> FunctionalOp:
    """The operator that does for each tensor of a list what operator `name` does for a tensor."""
    one = OPS[name]
    assert one.shape is not None
    assert one.gradient is not None
    return FunctionalOp(
        one.arguments,
        kernels.for_each(one.kernel),
        kernels.for_each(one.shape),
        kernels.gradient_for_each(one.gradient),
        tensor="Tensor[] inputs",
        result="Tensor[]",
        doc=f"`{name}` of each tensor.",
    )


for _name in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
    OPS[f"{_name}_coalesced"] = _coalesced(_name)

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
    schema = compat.schema_of(packet.default)
    call.__doc__ = f"{row.doc}\n\n    torch.ops.{schema}"
    parameters = [
        inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in schema.arguments
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call if _TAKES_GROUPS else functools.wraps(call)(call_with_communicator)


_comm = compat.register_custom_class(Communicator, CONSTANT)
if _comm is None:
    raise UnsupportedError(
        f"torch {torch.__version__} takes no objects as arguments of custom operators",
        hint="update torch; without torch.compile call the communicator's methods",
    )
_group = compat.register_process_groups()
_TAKES_GROUPS = _group is not None
_TYPES = {"": _group or _comm, ".comm": _comm}
compat.not_traced(row.kernel for row in OPS.values())
for _name, _row in OPS.items():
    for _overload, _type in _TYPES.items():
        _define(_name, _row, _overload, _type)
    globals()[_name] = _function(_name, _row)

__all__ = ["OPS", "FunctionalOp", "communicator", "group_size"]
__all__ += OPS  # noqa: PLE0605
