"""What torch.compile traces where a graph calls a method of a `Communicator`.

Each function here has the parameters of the method of its name and does the same with operators of
`unicomm.functional`. Like the methods, they take no part in gradients. With `async_op=True` the operation has
completed, too, when the call is over: a graph that overlaps operations uses `unicomm.functional.*_async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unicomm.c10d import compat
from unicomm.comms.communicator import Communicator

from .declare import TRACED
from .messages import barrier as _barrier
from .messages import recv as _recv
from .messages import send as _send

Tensor = torch.Tensor


class CompletedWork:
    """The Work of an operation in a graph: complete."""

    def wait(self, timeout: Any = None) -> None:
        """Returns at once."""

    def wait_blocking(self, timeout: Any = None) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True


_COMPLETED = CompletedWork()


def _ordinary(hints: Any, timeout: Any) -> None:
    if hints is not None or timeout is not None:
        raise NotImplementedError(  # torch.compile cannot make the exceptions of unicomm
            "an operation in a graph has neither hints nor a timeout; set them for the communicator"
        )


def _name(op: Any) -> str:
    if op.factor is not None:
        raise NotImplementedError("no PREMUL_SUM in a graph; multiply the tensor, then use ReduceOp.SUM")
    name: str = op.type.name
    return name.lower()


def _into(output: Tensor, result: Tensor) -> CompletedWork:
    if output.dtype != result.dtype:
        raise NotImplementedError(f"the output is of {output.dtype}, the input of {result.dtype}")
    output.detach().copy_(result.view(output.shape))
    return _COMPLETED


def broadcast(
    self: Any, tensor: Tensor, root: int, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    torch.ops.unicomm.broadcast_.comm(tensor.detach(), root, self)
    return _COMPLETED


def all_reduce(
    self: Any, tensor: Tensor, op: Any, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    torch.ops.unicomm.all_reduce_.comm(tensor.detach(), _name(op), self)
    return _COMPLETED


def reduce(
    self: Any,
    tensor: Tensor,
    root: int,
    op: Any,
    async_op: bool = False,
    hints: Any = None,
    timeout: Any = None,
) -> Any:
    _ordinary(hints, timeout)
    return _into(tensor, torch.ops.unicomm.reduce.comm(tensor.detach(), root, _name(op), self))


def all_gather_single(
    self: Any, output: Tensor, input: Tensor, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    return _into(output, torch.ops.unicomm.all_gather_single.comm(input.detach(), self))


def reduce_scatter_single(
    self: Any,
    output: Tensor,
    input: Tensor,
    op: Any,
    async_op: bool = False,
    hints: Any = None,
    timeout: Any = None,
) -> Any:
    _ordinary(hints, timeout)
    return _into(output, torch.ops.unicomm.reduce_scatter_single.comm(input.detach(), _name(op), self))


def all_to_all_single(
    self: Any, output: Tensor, input: Tensor, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    return _into(output, torch.ops.unicomm.all_to_all_single.comm(input.detach(), self))


def all_to_all_v_single(
    self: Any,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    async_op: bool = False,
    hints: Any = None,
    timeout: Any = None,
) -> Any:
    _ordinary(hints, timeout)
    moved = torch.ops.unicomm.all_to_all_v_single.comm(
        input.detach(), list(output_split_sizes), list(input_split_sizes), self
    )
    return _into(output, moved)


def scatter(
    self: Any,
    output_tensor: Tensor,
    input_tensor_list: Sequence[Tensor],
    root: int,
    async_op: bool = False,
    hints: Any = None,
    timeout: Any = None,
) -> Any:
    _ordinary(hints, timeout)
    flat = output_tensor.detach().reshape(-1)
    if self.get_rank() == root:
        if len(input_tensor_list) != self.get_size():
            raise NotImplementedError("the root has to pass one input for each rank")
        for one in input_tensor_list:
            if one.numel() != output_tensor.numel() or one.dtype != output_tensor.dtype:
                raise NotImplementedError("each input has to be of the output's type and number of elements")
        flat = torch.cat([t.detach().reshape(-1) for t in input_tensor_list])
    return _into(output_tensor, torch.ops.unicomm.scatter.comm(flat, root, output_tensor.numel(), self))


def gather_single(
    self: Any,
    output: Tensor | None,
    input: Tensor,
    root: int,
    async_op: bool = False,
    hints: Any = None,
    timeout: Any = None,
) -> Any:
    _ordinary(hints, timeout)
    if output is None and self.get_rank() == root:
        raise NotImplementedError("the root has to pass an output")
    gathered = torch.ops.unicomm.gather.comm(input.detach(), root, self)
    return _COMPLETED if output is None else _into(output, gathered)


def barrier(self: Any, async_op: bool = False, hints: Any = None, timeout: Any = None) -> Any:
    _ordinary(hints, timeout)
    _barrier(self)
    return _COMPLETED


def send(
    self: Any, tensor: Tensor, dst: int, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    _send(tensor, dst, self)
    return _COMPLETED


def recv(
    self: Any, tensor: Tensor, src: int, async_op: bool = False, hints: Any = None, timeout: Any = None
) -> Any:
    _ordinary(hints, timeout)
    return _into(tensor, _recv(tensor, src, self))


def trace_methods() -> None:
    """Has graphs trace the functions here in place of the methods of the same names."""
    for name in TRACED:
        compat.trace_instead(getattr(Communicator, name), globals()[name])
