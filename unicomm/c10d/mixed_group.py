"""A process group in which communicators serve some devices and torch's own backends serve the others.

For `init_process_group(backend="cpu:unicomm,cuda:nccl")`. torch would put the backends of several devices
into one group of its own class, which takes only backends written in C++. Here the group is unicomm's, and
passes each call whose tensors are on one of torch's devices to torch's backend. Nothing is compiled against
torch.
"""

# The method names are torch's.
# mypy: disable-error-code="misc"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from unicomm.comms.communicator import Communicator

from . import batch_isend_irecv as batches
from .calls.layouts import tensors_in
from .calls.table import all_names
from .compat import Store
from .process_group import UnicommProcessGroup


class MixedProcessGroup(UnicommProcessGroup):
    """A process group with communicators and, for other device types, torch's backends (`others`)."""

    def __init__(self, *comms: Communicator, others: Mapping[str, Any], store: Store | None = None) -> None:
        super().__init__(*comms, store=store)
        self._only = None  # the device of the tensors decides
        self._others = dict(others)

    def _get_backend(self, device: torch.device) -> Any:
        other = self._others.get(torch.device(device).type)
        return super()._get_backend(device) if other is None else other

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in (*self._comms, *self._others)]

    def shutdown(self) -> None:
        super().shutdown()
        for other in self._others.values():
            other.shutdown()

    def abort(self) -> None:
        super().abort()
        for other in self._others.values():
            other.abort()

    def barrier(self, opts: Any = None) -> dist.Work:
        device = getattr(opts, "device", None)
        other = self._others.get(torch.device(device).type) if device is not None else None
        return super().barrier(opts) if other is None else other.barrier(opts)

    def _start_coalescing(self, device: torch.device) -> None:
        other = self._others.get(torch.device(device).type)
        if other is None:
            super()._start_coalescing(device)
        else:
            batches.tell_start(other)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        other = self._others.get(torch.device(device).type)
        ended = super()._end_coalescing(device) if other is None else batches.tell_end(other)
        return cast(dist.Work, ended)


def _passing_on(name: str) -> Callable[..., Any]:
    ours = getattr(UnicommProcessGroup, name)

    def method(self: MixedProcessGroup, *arguments: Any) -> Any:
        tensor = next(tensors_in(arguments), None)
        other = None if tensor is None else self._others.get(tensor.device.type)
        if other is None:
            return ours(self, *arguments)
        if name in ("send", "recv"):
            return batches.pass_on(other, name, arguments)
        return getattr(other, name)(*arguments)

    method.__name__ = method.__qualname__ = name
    return method


for _name in all_names():
    if _name != "barrier":
        setattr(MixedProcessGroup, _name, _passing_on(_name))
