"""The table of custom operators: arguments, kernel, shape function and gradient of each.

declare.py declares them to torch, kernels.py has what the rows name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import kernels


@dataclass(frozen=True)
class FunctionalOp:
    """An operator. `arguments` stand between the tensor and the group, in the syntax of torch's schemas."""

    arguments: str
    kernel: Callable[..., Any]
    shape: Callable[..., Any] | None
    gradient: Callable[..., Any] | None = None
    tensor: str = "Tensor input"
    result: str = "Tensor"
    #: A rank that does not use the result must take part all the same: compilers keep the operator.
    keep: bool = False
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
    "gather": FunctionalOp(
        "int root",
        kernels.gather,
        kernels.gather_like,
        kernels.d_gather,
        keep=True,
        doc="On the root the `input` of all ranks, concatenated along the first dimension; 0 rows elsewhere.",
    ),
    "scatter": FunctionalOp(
        "int root, SymInt rows",
        kernels.scatter,
        kernels.scatter_like,
        kernels.d_scatter,
        keep=True,
        doc="This rank's `rows` rows of the root's `input`, which has `rows` for each rank. Of the `input` of"
        " other ranks only dtype, device and further dimensions count.",
    ),
    "reduce_to_root": FunctionalOp(
        "int root",
        kernels.reduce_to_root,
        kernels.like,
        kernels.d_reduce_to_root,
        doc="The sum of all ranks' `input` on the root, zeros elsewhere: the gradient of `broadcast`.",
    ),
    "gather_to_root": FunctionalOp(
        "int root, SymInt[] shape",
        kernels.gather_to_root,
        kernels.shaped_like,
        kernels.d_gather_to_root,
        doc="`gather` on the root, zeros of the given `shape` elsewhere: the gradient of `scatter`.",
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
