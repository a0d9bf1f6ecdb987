"""Messages and the barrier as functions: `send`, `recv` and `barrier` in graphs.

    unicomm.functional.send(x, 1, group)
    y = unicomm.functional.recv(torch.empty(4), 0, group)      # a new tensor of that shape and dtype

A compiler may move a function whose result nobody needs yet, and drop one whose result nobody needs at all.
With messages, either leads to ranks that wait for each other. So each operator here also declares that it
changes its argument `order`, a tensor that all of them share: compilers then keep all of them, in the
program's order. Nothing is written to that tensor.

Messages have no gradient: the sender's backward would have to receive what the receiver's backward sends,
and each rank's own loss decides whether and when either runs. `permute` has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unicomm.c10d import compat
from unicomm.comms.communicator import Communicator

from .declare import GROUP, define, describe
from .kernels import Group, Tensor, as_input, communicator, like
from .table import FunctionalOp

#: Argument `order` of all operators here. Graphs take it as an input that they change.
_order = torch.zeros(1, dtype=torch.uint8, device="cpu")


def _send(x: Tensor, dst: int, order: Tensor, group: Group) -> None:
    communicator(group, x.device).send(as_input(x), dst, async_op=False)


def _recv(x: Tensor, src: int, order: Tensor, group: Group) -> Tensor:
    out = like(x)
    communicator(group, x.device).recv(out, src, async_op=False)
    return out


def _barrier(order: Tensor, group: Group) -> None:
    group = compat.real_object(group)
    work = group.barrier(async_op=False) if isinstance(group, Communicator) else group.barrier()
    work.wait()


MESSAGE_OPS = {
    "send": FunctionalOp(
        "int dst, Tensor(a!) order",
        _send,
        None,
        result="()",
        doc="Sends `input` to rank `dst`, which must receive it. No gradient.",
    ),
    "recv": FunctionalOp(
        "int src, Tensor(a!) order",
        _recv,
        like,
        doc="The next message of rank `src`, a new tensor of `input`'s shape, dtype and device. No gradient.",
    ),
    "barrier": FunctionalOp(
        "",
        _barrier,
        None,
        tensor="Tensor(a!) order",
        result="()",
        doc="Returns when all ranks have called it.",
    ),
}


def _group(group: Any, device: torch.device) -> Any:
    known = GROUP is not None or not isinstance(group, dist.ProcessGroup)
    return group if known else communicator(group, device)


def send(input: Tensor, dst: int, group: Any) -> None:
    torch.ops.unicomm.send(input.detach(), dst, _order, _group(group, input.device))


def recv(input: Tensor, src: int, group: Any) -> Any:
    return torch.ops.unicomm.recv(input.detach(), src, _order, _group(group, input.device))


def barrier(group: Any) -> None:
    torch.ops.unicomm.barrier(_order, _group(group, _order.device))


def declare_all() -> dict[str, Callable[..., Any]]:
    """Declares the operators; returns their functions by name."""
    functions: dict[str, Callable[..., Any]] = {"send": send, "recv": recv, "barrier": barrier}
    for name, row in MESSAGE_OPS.items():
        define(name, row)
        describe(functions[name], name, row, but=("order",))
    return functions
