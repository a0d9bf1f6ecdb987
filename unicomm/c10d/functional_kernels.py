"""The kernel, the shape function and the gradient of each operator of functional.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.operations.reduction import RedOpType, ReduceOp

from .compat import real_object
from .process_group import UnicommProcessGroup

Tensor = torch.Tensor
Group = dist.ProcessGroup | Communicator

_LINEAR = ("sum", "avg")


def reduction(op: str) -> ReduceOp:
    """Returns the reduction named `op`: sum, product, min, max, band, bor, bxor or avg."""
    names = [t.name.lower() for t in RedOpType if t is not RedOpType.PREMUL_SUM]
    if op.lower() not in names:
        raise InvalidArgumentError(f"op={op!r} is no reduction", hint=f"use one of {', '.join(names)}")
    found: ReduceOp = getattr(ReduceOp, op.upper())
    return found


def communicator(group: Group, device: torch.device) -> Communicator:
    """Returns the communicator of `group` for tensors on `device`. For kernels of custom operators."""
    group = real_object(group)
    if isinstance(group, Communicator):
        return group
    if isinstance(group, UnicommProcessGroup):
        return group.get_comm(device)
    raise UnsupportedError(
        f"group is a {type(group).__name__} without communicators",
        hint='make it by init_process_group("unicomm"), under TORCH_DISTRIBUTED_USE_TORCHCOMMS=1, or pass a'
        " Communicator",
    )


def group_size(group: Group) -> int:
    """Returns the number of ranks. Works also while a graph is traced."""
    real = real_object(group)
    return real.get_size() if isinstance(real, Communicator) else int(real.size())


def _rank(group: Group) -> int:
    real = real_object(group)
    return real.get_rank() if isinstance(real, Communicator) else int(real.rank())


def _rows(name: str, x: Tensor, group: Group) -> None:
    n = group_size(group)
    if x.dim() == 0 or x.shape[0] % n:
        raise InvalidArgumentError(
            f"{name}: the first dimension of {tuple(x.shape)} cannot be cut into {n} equal parts",
            hint="pad it, or use all_to_all_v_single with the parts' sizes",
        )


def _as_input(x: Tensor) -> Tensor:
    return x.contiguous().resolve_conj().resolve_neg()


# --- kernels, which return new tensors ----------------------------------------------------------------------


def _copy(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def all_reduce(x: Tensor, op: str, group: Group) -> Tensor:
    out = _copy(x)
    communicator(group, x.device).all_reduce(out, reduction(op), async_op=False)
    return out


def broadcast(x: Tensor, root: int, group: Group) -> Tensor:
    out = _copy(x)
    communicator(group, x.device).broadcast(out, root, async_op=False)
    return out


def reduce(x: Tensor, root: int, op: str, group: Group) -> Tensor:
    out = _copy(x)
    communicator(group, x.device).reduce(out, root, reduction(op), async_op=False)
    return out


def all_gather_single(x: Tensor, group: Group) -> Tensor:
    comm = communicator(group, x.device)
    out = x.new_empty(_gathered(x.shape, comm.get_size()))
    comm.all_gather_single(out, _as_input(x), async_op=False)
    return out


def reduce_scatter_single(x: Tensor, op: str, group: Group) -> Tensor:
    _rows("reduce_scatter_single", x, group)
    comm = communicator(group, x.device)
    out = x.new_empty((x.shape[0] // comm.get_size(), *x.shape[1:]))
    comm.reduce_scatter_single(out, _as_input(x), reduction(op), async_op=False)
    return out


def all_to_all_single(x: Tensor, group: Group) -> Tensor:
    _rows("all_to_all_single", x, group)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    communicator(group, x.device).all_to_all_single(out, _as_input(x), async_op=False)
    return out


def all_to_all_v_single(x: Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> Tensor:
    out = x.new_empty((sum(output_splits), *x.shape[1:]))
    comm = communicator(group, x.device)
    comm.all_to_all_v_single(out, _as_input(x), list(output_splits), list(input_splits), async_op=False)
    return out


def permute(x: Tensor, destinations: list[int], group: Group) -> Tensor:
    comm = communicator(group, x.device)
    me, n = comm.get_rank(), comm.get_size()
    if sorted(destinations) != list(range(n)):
        raise InvalidArgumentError(
            f"destinations={list(destinations)} is no permutation of the {n} ranks",
            hint="destinations[r] is the rank that rank r's tensor goes to",
        )
    if destinations[me] == me:
        return _copy(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch = comm.batch_op_create()
    batch.send(_as_input(x), destinations[me]).recv(out, destinations.index(me))
    batch.issue(async_op=False)
    return out


def all_reduce_(x: Tensor, op: str, group: Group) -> None:
    communicator(group, x.device).all_reduce(x, reduction(op), async_op=False)


def broadcast_(x: Tensor, root: int, group: Group) -> None:
    communicator(group, x.device).broadcast(x, root, async_op=False)


# --- shape functions: empty tensors of the shape of the result ----------------------------------------------


def _gathered(shape: Sequence[int], n: int) -> tuple[int, ...]:
    return (n * shape[0], *shape[1:]) if len(shape) else (n,)


def like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gathered_like(x: Tensor, group: Group) -> Tensor:
    return x.new_empty(_gathered(x.shape, group_size(group)))


def scattered_like(x: Tensor, op: str, group: Group) -> Tensor:
    _rows("reduce_scatter_single", x, group)
    return x.new_empty((x.shape[0] // group_size(group), *x.shape[1:]))


def v_like(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: Group) -> Tensor:
    return x.new_empty((sum(output_splits), *x.shape[1:]))


# --- gradients: (gradient of the result, shape of the input, further arguments) -> gradient of the input ----


def d_all_reduce(grad: Any, shape: Any, op: str, group: Group) -> Any:
    return _op("all_reduce", group)(grad, _linear("all_reduce", op), group)


def d_broadcast(grad: Any, shape: Any, root: int, group: Group) -> Any:
    total = _op("reduce", group)(grad, root, "sum", group)
    return total if _rank(group) == root else torch.zeros_like(total)


def d_reduce(grad: Any, shape: Any, root: int, op: str, group: Group) -> Any:
    everyone = _op("broadcast", group)(grad, root, group)
    if _linear("reduce", op) == "avg":
        everyone = everyone / group_size(group)
    # On the other ranks the result is the input.
    return everyone if _rank(group) == root else everyone + grad


def d_all_gather_single(grad: Any, shape: Any, group: Group) -> Any:
    return _op("reduce_scatter_single", group)(grad, "sum", group).reshape(shape)


def d_reduce_scatter_single(grad: Any, shape: Any, op: str, group: Group) -> Any:
    out = _op("all_gather_single", group)(grad, group)
    return out / group_size(group) if _linear("reduce_scatter_single", op) == "avg" else out


def d_all_to_all_single(grad: Any, shape: Any, group: Group) -> Any:
    return _op("all_to_all_single", group)(grad, group)


def d_all_to_all_v_single(grad: Any, shape: Any, outs: list[int], ins: list[int], group: Group) -> Any:
    return _op("all_to_all_v_single", group)(grad, ins, outs, group)


def d_permute(grad: Any, shape: Any, destinations: list[int], group: Group) -> Any:
    back = [list(destinations).index(r) for r in range(len(destinations))]
    return _op("permute", group)(grad, back, group)


def _linear(name: str, op: str) -> str:
    if op.lower() not in _LINEAR:
        raise UnsupportedError(
            f"{name} has no gradient for op={op!r}", hint='detach the input, or use "sum" or "avg"'
        )
    return op.lower()


def for_each(one: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel or shape function of an operator on a list, from that of the operator on a tensor."""

    def all_of_them(xs: Sequence[Tensor], *arguments: Any) -> list[Any]:
        return [one(x, *arguments) for x in xs]

    return all_of_them


def gradient_for_each(one: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradient of an operator on a list, from that of the operator on a tensor."""

    def all_of_them(grads: Sequence[Any], shapes: Sequence[Any], *arguments: Any) -> list[Any]:
        return [one(grad, shape, *arguments) for grad, shape in zip(grads, shapes, strict=True)]

    return all_of_them


def _op(name: str, group: Group) -> Any:
    """Returns the overload of an operator for the type of `group`."""
    group = real_object(group)
    packet = getattr(torch.ops.unicomm, name)
    return packet.comm if isinstance(group, Communicator) else packet.default
