"""The kernel, the shape function and the gradient of each operator of functional.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicomm.c10d.compat import real_object
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.operations.reduction import RedOpType, ReduceOp

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
    """Returns the number of ranks of `group`. Works also while a graph is traced."""
    real = real_object(group)
    return real.get_size() if isinstance(real, Communicator) else int(real.size())


def _rank(group: Group) -> int:
    real = real_object(group)
    return real.get_rank() if isinstance(real, Communicator) else int(real.rank())


def check_rows(name: str, x: Tensor, group: Group) -> None:
    """Raises `InvalidArgumentError` unless the group's ranks can have equal parts of `x`."""
    n = group_size(group)
    if x.dim() == 0 or x.shape[0] % n:
        raise InvalidArgumentError(
            f"{name}: the first dimension of {tuple(x.shape)} cannot be cut into {n} equal parts",
            hint="pad it, or use all_to_all_v_single with the parts' sizes",
        )


def as_input(x: Tensor) -> Tensor:
    """Returns `x`, or a copy of it whose memory holds its elements in order."""
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
    comm.all_gather_single(out, as_input(x), async_op=False)
    return out


def reduce_scatter_single(x: Tensor, op: str, group: Group) -> Tensor:
    check_rows("reduce_scatter_single", x, group)
    comm = communicator(group, x.device)
    out = x.new_empty((x.shape[0] // comm.get_size(), *x.shape[1:]))
    comm.reduce_scatter_single(out, as_input(x), reduction(op), async_op=False)
    return out


def all_to_all_single(x: Tensor, group: Group) -> Tensor:
    check_rows("all_to_all_single", x, group)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    communicator(group, x.device).all_to_all_single(out, as_input(x), async_op=False)
    return out


def all_to_all_v_single(x: Tensor, output_splits: list[int], input_splits: list[int], group: Group) -> Tensor:
    out = x.new_empty((sum(output_splits), *x.shape[1:]))
    comm = communicator(group, x.device)
    comm.all_to_all_v_single(out, as_input(x), list(output_splits), list(input_splits), async_op=False)
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
    batch.send(as_input(x), destinations[me]).recv(out, destinations.index(me))
    batch.issue(async_op=False)
    return out


def gather(x: Tensor, root: int, group: Group) -> Tensor:
    comm = communicator(group, x.device)
    out = gather_like(x, root, group)
    comm.gather_single(out if comm.get_rank() == root else None, as_input(x), root, async_op=False)
    return out


def scatter(x: Tensor, root: int, rows: int, group: Group) -> Tensor:
    comm = communicator(group, x.device)
    out = scatter_like(x, root, rows, group)
    parts: list[Tensor] = []
    if comm.get_rank() == root:  # torch.split makes one part of what has no rows
        parts = list(torch.split(as_input(x), rows)) if rows else [as_input(x)] * comm.get_size()
    comm.scatter(out, parts, root, async_op=False)
    return out


def reduce_to_root(x: Tensor, root: int, group: Group) -> Tensor:
    out = reduce(x, root, "sum", group)
    return out if _rank(group) == root else out.zero_()


def gather_to_root(x: Tensor, root: int, shape: Sequence[int], group: Group) -> Tensor:
    out = gather(x, root, group)
    return out if _rank(group) == root else x.new_zeros(tuple(shape))


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
    check_rows("reduce_scatter_single", x, group)
    return x.new_empty((x.shape[0] // group_size(group), *x.shape[1:]))


def v_like(x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: Group) -> Tensor:
    return x.new_empty((sum(output_splits), *x.shape[1:]))


def gather_like(x: Tensor, root: int, group: Group) -> Tensor:
    rows, *others = _gathered(x.shape, group_size(group))
    _check_root("gather", root, group)
    return x.new_empty((rows if _rank(group) == root else 0, *others))


def scatter_like(x: Tensor, root: int, rows: int, group: Group) -> Tensor:
    n = group_size(group)
    _check_root("scatter", root, group)
    if x.dim() == 0 or rows < 0 or (_rank(group) == root and x.shape[0] != n * rows):
        raise InvalidArgumentError(
            f"scatter: the root's input of shape {tuple(x.shape)} does not have {rows} rows for each rank",
            hint=f"rows={rows} needs an input of {n * rows} rows on the root",
        )
    return x.new_empty((rows, *x.shape[1:]))


def shaped_like(x: Tensor, root: int, shape: Sequence[int], group: Group) -> Tensor:
    return x.new_empty(tuple(shape))


def _check_root(name: str, root: int, group: Group) -> None:
    if not 0 <= root < group_size(group):
        raise InvalidArgumentError(
            f"{name}: root={root} is no rank of a group of {group_size(group)}", hint="ranks count from 0"
        )


# --- gradients: (gradient of the result, shape of the input, further arguments) -> gradient of the input ----


def operator(name: str, group: Group) -> Any:
    """Returns the overload of an operator for the type of `group`."""
    group = real_object(group)
    packet = getattr(torch.ops.unicomm, name)
    return packet.comm if isinstance(group, Communicator) else packet.default


# What differs between ranks stays inside an operator, as in `reduce_to_root`. If a graph had zeros on all
# ranks but the root, compilers would compute with these zeros at once, and drop or move collectives.

#: (name of an operator, group) -> what a gradient calls for it
Find = Callable[[str, Group], Any]


def d_all_reduce(grad: Any, shape: Any, op: str, group: Group, find: Find = operator) -> Any:
    return find("all_reduce", group)(grad, _linear("all_reduce", op), group)


def d_broadcast(grad: Any, shape: Any, root: int, group: Group, find: Find = operator) -> Any:
    return find("reduce_to_root", group)(grad, root, group)


def d_reduce_to_root(grad: Any, shape: Any, root: int, group: Group, find: Find = operator) -> Any:
    return find("broadcast", group)(grad, root, group)


def d_reduce(grad: Any, shape: Any, root: int, op: str, group: Group, find: Find = operator) -> Any:
    everyone = find("broadcast", group)(grad, root, group)
    if _linear("reduce", op) == "avg":
        everyone = everyone / group_size(group)
    # On the other ranks the result is the input.
    return everyone if _rank(group) == root else everyone + grad


def d_all_gather_single(grad: Any, shape: Any, group: Group, find: Find = operator) -> Any:
    return find("reduce_scatter_single", group)(grad, "sum", group).reshape(shape)


def d_reduce_scatter_single(grad: Any, shape: Any, op: str, group: Group, find: Find = operator) -> Any:
    out = find("all_gather_single", group)(grad, group)
    return out / group_size(group) if _linear("reduce_scatter_single", op) == "avg" else out


def d_all_to_all_single(grad: Any, shape: Any, group: Group, find: Find = operator) -> Any:
    return find("all_to_all_single", group)(grad, group)


def d_all_to_all_v_single(
    grad: Any, shape: Any, outs: list[int], ins: list[int], group: Group, find: Find = operator
) -> Any:
    return find("all_to_all_v_single", group)(grad, ins, outs, group)


def d_permute(grad: Any, shape: Any, destinations: list[int], group: Group, find: Find = operator) -> Any:
    back = [list(destinations).index(r) for r in range(len(destinations))]
    return find("permute", group)(grad, back, group)


def d_gather(grad: Any, shape: Any, root: int, group: Group, find: Find = operator) -> Any:
    rows = shape[0] if len(shape) else 1
    return find("scatter", group)(grad, root, rows, group).reshape(shape)


def d_scatter(grad: Any, shape: Any, root: int, rows: int, group: Group, find: Find = operator) -> Any:
    return find("gather_to_root", group)(grad, root, list(shape), group)


def d_gather_to_root(grad: Any, shape: Any, root: int, to: Any, group: Group, find: Find = operator) -> Any:
    return find("scatter", group)(grad, root, shape[0], group)


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
