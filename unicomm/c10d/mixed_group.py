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
from .compat import HashStore, Store
from .process_group import UnicommProcessGroup


class MixedProcessGroup(UnicommProcessGroup):
    """A process group with communicators and, for other device types, torch's backends (`others`)."""

    def __init__(self, *comms: Communicator, others: Mapping[str, Any], store: Store | None = None) -> None:
        super().__init__(*comms, store=store)
        self._only = None  # the device of the tensors decides
        self._others = dict(others)
        self._groups: dict[str, dist.ProcessGroup] = {}  # torch's own, each of one of them

    def _get_backend(self, device: torch.device) -> Any:
        other = self._others.get(torch.device(device).type)
        return super()._get_backend(device) if other is None else other

    def _taking(self, kind: str, name: str) -> Any:
        """Returns what takes a call for torch's backend of a device type."""
        other = self._others[kind]
        if hasattr(other, name):
            return other
        if kind not in self._groups:
            self._groups[kind] = torch_group(kind, other)
        return self._groups[kind]

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


def torch_group(kind: str, backend: Any) -> dist.ProcessGroup:
    """Returns a group of torch's own class with one of its backends, which has methods that `backend` lacks.

    In C++ a backend has more of them than in Python, such as those of FSDP2.
    """
    made = dist.ProcessGroup(HashStore(), backend.rank(), backend.size())
    of_its_own = dist.ProcessGroup.BackendType.CUSTOM
    made._set_default_backend(of_its_own)
    made._register_backend(torch.device(kind), of_its_own, backend)
    return made


def _passing_on(name: str) -> Callable[..., Any]:
    ours = getattr(UnicommProcessGroup, name)

    def method(self: MixedProcessGroup, *arguments: Any, **named: Any) -> Any:
        tensor = next(tensors_in((*arguments, *named.values())), None)
        other = None if tensor is None else self._others.get(tensor.device.type)
        if other is None:
            return ours(self, *arguments, **named)
        if name in ("send", "recv") and not named:
            return batches.pass_on(other, name, arguments)
        assert tensor is not None
        return getattr(self._taking(tensor.device.type, name), name)(*arguments, **named)

    method.__name__ = method.__qualname__ = name
    return method


for _name in all_names():
    if _name != "barrier":
        setattr(MixedProcessGroup, _name, _passing_on(_name))
