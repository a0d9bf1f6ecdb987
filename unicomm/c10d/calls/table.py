"""The table of the methods of torch's process groups that `torch_method` makes: one row for each.

Read by overloads.py (names and options), dispatcher.py (operators), titles.py and mixed_group.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from unicomm.c10d.compat import AllgatherOptions, AllreduceCoalescedOptions


@dataclass(frozen=True)
class GroupMethod:
    """A method of a process group.

    Attributes:
        operator: of `torch.ops.c10d`.
        title: what torch's Gloo calls it in events of torch.profiler.
        options: the class of its last argument; None for messages, which have none.
        second_form: the names of the arguments in torch's second form, in order; empty if it has none.
        renamed: arguments of the first form whose name in the second is another.
        aliases: other names of the method.
        single: its first arguments, if these are lists of one tensor, or of one list.
        may_lack: the one of these that only the root passes, as others may leave the list empty.
    """

    operator: str
    title: str
    options: Any = None
    second_form: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    may_lack: str = ""


METHODS = {
    "allreduce": GroupMethod(
        "allreduce_",
        "all_reduce",
        dist.AllreduceOptions,
        ("tensor", "op", "timeout"),
        {"tensors": "tensor"},
        single=("tensors",),
    ),
    "allreduce_coalesced": GroupMethod("allreduce_coalesced_", "all_reduce", AllreduceCoalescedOptions),
    "broadcast": GroupMethod(
        "broadcast_",
        "broadcast",
        dist.BroadcastOptions,
        ("tensor", "root", "timeout"),
        {"tensors": "tensor"},
        single=("tensors",),
    ),
    "reduce": GroupMethod(
        "reduce_",
        "reduce",
        dist.ReduceOptions,
        ("tensor", "root", "op", "timeout"),
        {"tensors": "tensor"},
        single=("tensors",),
    ),
    "allgather": GroupMethod(
        "allgather_",
        "all_gather",
        AllgatherOptions,
        ("output_tensors", "input_tensor", "timeout"),
        {"input_tensors": "input_tensor"},
        single=("output_tensors", "input_tensors"),
    ),
    "allgather_coalesced": GroupMethod("allgather_coalesced_", "all_gather", AllgatherOptions),
    "_allgather_base": GroupMethod(
        "_allgather_base_", "all_gather", AllgatherOptions, aliases=("all_gather_single",)
    ),
    "allgather_into_tensor_coalesced": GroupMethod(
        "allgather_into_tensor_coalesced_",
        "all_gather",
        AllgatherOptions,
        aliases=("all_gather_single_coalesced",),
    ),
    "reduce_scatter": GroupMethod(
        "reduce_scatter_",
        "reduce_scatter",
        dist.ReduceScatterOptions,
        ("output", "input", "op", "timeout"),
        {"output_tensors": "output", "input_tensors": "input"},
        single=("output_tensors", "input_tensors"),
    ),
    "_reduce_scatter_base": GroupMethod(
        "_reduce_scatter_base_",
        "reduce_scatter",
        dist.ReduceScatterOptions,
        aliases=("reduce_scatter_single",),
    ),
    "reduce_scatter_tensor_coalesced": GroupMethod(
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter",
        dist.ReduceScatterOptions,
        aliases=("reduce_scatter_single_coalesced",),
    ),
    "alltoall": GroupMethod("alltoall_", "all_to_all", dist.AllToAllOptions),
    "alltoall_base": GroupMethod(
        "alltoall_base_",
        "all_to_all",
        dist.AllToAllOptions,
        ("output", "input", "output_split_sizes", "input_split_sizes", "timeout"),
        aliases=("all_to_all_single",),
    ),
    "gather": GroupMethod(
        "gather_",
        "gather",
        dist.GatherOptions,
        ("output_tensors", "input_tensor", "root", "timeout"),
        {"input_tensors": "input_tensor"},
        single=("output_tensors", "input_tensors"),
        may_lack="output_tensors",
    ),
    "scatter": GroupMethod(
        "scatter_",
        "scatter",
        dist.ScatterOptions,
        ("output_tensor", "input_tensors", "root", "timeout"),
        {"output_tensors": "output_tensor"},
        single=("output_tensors", "input_tensors"),
        may_lack="input_tensors",
    ),
    "barrier": GroupMethod("barrier", "barrier", dist.BarrierOptions, ("timeout",)),
    "send": GroupMethod("send", "send", single=("tensors",)),
    "recv": GroupMethod("recv_", "recv", single=("tensors",)),
    "recv_anysource": GroupMethod("recv_any_source_", "recvAnySource", single=("tensors",)),
}


def all_names() -> Iterator[str]:
    """Yields the names of all methods, aliases included."""
    for name, row in METHODS.items():
        yield from (name, *row.aliases)
