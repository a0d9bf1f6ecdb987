"""What torchcomms' hooks receive: one type for each operation, made from `OpArgs`.

A pre-hook gets `(name, op_id, args)` and a post-hook `(op_id, args)`. Operations that torchcomms has no type
for, such as `reconfigure` and those on symmetric memory, call no hook of torchcomms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unicomm.comms.operations.call import OpArgs

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Asynchronous:
    async_op: bool


@dataclass(frozen=True)
class _Message(_Asynchronous):
    tensor: Tensor
    peer: int


@dataclass(frozen=True)
class _InPlace(_Asynchronous):
    tensor: Tensor


@dataclass(frozen=True)
class _RootedInPlace(_InPlace):
    root: int


@dataclass(frozen=True)
class _OneToOne(_Asynchronous):
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class _OneToMany(_Asynchronous):
    input: Tensor
    output: list[Tensor]


@dataclass(frozen=True)
class _ManyToOne(_Asynchronous):
    input: list[Tensor]
    output: Tensor


class SendPreHookArgs(_Message): ...


class RecvPreHookArgs(_Message): ...


class BroadcastPreHookArgs(_RootedInPlace): ...


class AllReducePreHookArgs(_InPlace): ...


class ReducePreHookArgs(_RootedInPlace): ...


class AllGatherPreHookArgs(_OneToMany): ...


class AllGatherVPreHookArgs(_OneToMany): ...


class AllGatherSinglePreHookArgs(_OneToOne): ...


class ReduceScatterPreHookArgs(_ManyToOne): ...


class ReduceScatterVPreHookArgs(_ManyToOne): ...


class ReduceScatterSinglePreHookArgs(_OneToOne): ...


class AllToAllSinglePreHookArgs(_OneToOne): ...


@dataclass(frozen=True)
class AllToAllVSinglePreHookArgs(_OneToOne):
    input_split_sizes: list[int]
    output_split_sizes: list[int]


@dataclass(frozen=True)
class AllToAllPreHookArgs(_Asynchronous):
    input: list[Tensor]
    output: list[Tensor]


class BarrierPreHookArgs(_Asynchronous): ...


@dataclass(frozen=True)
class ScatterPreHookArgs(_ManyToOne):
    root: int


@dataclass(frozen=True)
class GatherPreHookArgs(_OneToMany):
    root: int


@dataclass(frozen=True)
class GatherSinglePreHookArgs(_Asynchronous):
    """`output` is None except at the root."""

    input: Tensor
    output: Tensor | None
    root: int


@dataclass(frozen=True)
class SplitPreHookArgs:
    ranks: list[int]
    name: str


class NewWindowPreHookArgs: ...


@dataclass(frozen=True)
class BatchOpIssuePreHookArgs(_Asynchronous):
    num_ops: int


class FinalizePreHookArgs: ...


class CollectivePostHookArgs: ...


class SplitPostHookArgs: ...


class NewWindowPostHookArgs: ...


class BatchOpIssuePostHookArgs: ...


class FinalizePostHookArgs: ...


def _one(tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[0] if tensors else None


#: Operation -> its type, whose fields are taken from `_FIELDS`.
_TYPES: dict[str, Callable[..., object]] = {
    "send": SendPreHookArgs,
    "recv": RecvPreHookArgs,
    "broadcast": BroadcastPreHookArgs,
    "all_reduce": AllReducePreHookArgs,
    "reduce": ReducePreHookArgs,
    "all_gather": AllGatherPreHookArgs,
    "all_gather_v": AllGatherVPreHookArgs,
    "all_gather_single": AllGatherSinglePreHookArgs,
    "reduce_scatter": ReduceScatterPreHookArgs,
    "reduce_scatter_v": ReduceScatterVPreHookArgs,
    "reduce_scatter_single": ReduceScatterSinglePreHookArgs,
    "all_to_all_single": AllToAllSinglePreHookArgs,
    "all_to_all_v_single": AllToAllVSinglePreHookArgs,
    "all_to_all": AllToAllPreHookArgs,
    "barrier": BarrierPreHookArgs,
    "scatter": ScatterPreHookArgs,
    "gather": GatherPreHookArgs,
    "gather_single": GatherSinglePreHookArgs,
    "split": SplitPreHookArgs,
    "new_window": NewWindowPreHookArgs,
    "batch": BatchOpIssuePreHookArgs,
    "finalize": FinalizePreHookArgs,
}
_POST: dict[str, type] = {
    "split": SplitPostHookArgs,
    "new_window": NewWindowPostHookArgs,
    "batch": BatchOpIssuePostHookArgs,
    "finalize": FinalizePostHookArgs,
}
#: Operations whose `input` or `output` is a list of tensors, one for each rank.
_LISTS = {
    "input": {"reduce_scatter", "reduce_scatter_v", "all_to_all", "scatter"},
    "output": {"all_gather", "all_gather_v", "all_to_all", "gather"},
}


def _input(args: OpArgs) -> object:
    return list(args.inputs) if args.name in _LISTS["input"] else _one(args.inputs)


def _output(args: OpArgs) -> object:
    return list(args.outputs) if args.name in _LISTS["output"] else _one(args.outputs)


_FIELDS: dict[str, Callable[[OpArgs], object]] = {
    "async_op": lambda args: args.async_op,
    "tensor": lambda args: _one(args.inputs or args.outputs),
    "peer": lambda args: args.peer,
    "root": lambda args: args.root,
    "input": _input,
    "output": _output,
    "input_split_sizes": lambda args: list(args.in_splits or ()),
    "output_split_sizes": lambda args: list(args.out_splits or ()),
    "ranks": lambda args: list(args.ranks),
    "name": lambda args: args.child,
    "num_ops": lambda args: len(args.messages),
}


def _has_type(args: OpArgs) -> bool:
    # unicomm calls hooks for the tensor of a new window, too, which is given or registered later.
    return args.name in _TYPES and not (args.name == "new_window" and args.outputs)


def pre_hook_arguments(args: OpArgs) -> object | None:
    """Returns the typed arguments of a pre-hook, or None if torchcomms has no type for the operation."""
    if not _has_type(args):
        return None
    made = _TYPES[args.name]
    names = getattr(made, "__dataclass_fields__", ())
    return made(**{name: _FIELDS[name](args) for name in names})


def post_hook_arguments(args: OpArgs) -> object | None:
    """Returns the typed arguments of a post-hook, or None if torchcomms has no type for the operation."""
    if not _has_type(args):
        return None
    made: object = _POST.get(args.name, CollectivePostHookArgs)()
    return made
