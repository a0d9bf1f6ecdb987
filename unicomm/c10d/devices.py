"""Which backend and which device stand behind what a torch.distributed program names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .switch import CHOICE

if TYPE_CHECKING:
    from unicomm.comms.communicator import Communicator


def chosen_backend(name: str, device_type: str) -> str:
    """What stands behind the backend that a program names, for a device type.

    UNICOMM_BACKEND is one backend, which serves the devices that it takes, or names some by device, such as
    "cpu:shm,cuda:nccl". All others get what their device is made for. Raises `InvalidArgumentError` for a
    backend that there is not.
    """
    choice = os.environ.get(CHOICE, "")
    if ":" in choice:
        by_device = dict(part.strip().split(":", 1) for part in choice.split(",") if ":" in part)
        choice = by_device.get(device_type, "")
    if choice and choice != "auto" and (device_type == "cpu" or device_type in _devices_of(choice)):
        return choice
    return {"cpu": "auto", "cuda": "rccl" if torch.version.hip else "nccl"}.get(device_type, name)


def _devices_of(backend: str) -> frozenset[str]:
    from unicomm.backends.registry import find_backend

    return find_backend(backend).capabilities.device_types


def is_present(device_type: str) -> bool:
    """Whether tensors can be on that kind of device here."""
    module = getattr(torch, device_type, None)
    return device_type == "cpu" or bool(module is not None and module.is_available())


def bind(comm: Communicator, given: torch.device | None) -> None:
    """Notes that the program chose the communicator's device, `given`: torch has groups made later follow.

    torch itself notes it on a group of its own, which ours replaces.
    """
    if given is not None and given.type == comm.get_device().type:
        comm.bound_device = given


def device_of(
    device_type: str, given: torch.device | None, environ: Mapping[str, str], module: Any
) -> torch.device:
    """The device of this rank, with its number, which torch does not say.

    The one that the program passes as `device_id`; else its current one, if it has chosen one; else that of
    LOCAL_RANK, where this process sees so many: a program may choose its device after its group, and all
    ranks on the first one cannot be meant. `module`: torch's for that kind of device.
    """
    if given is not None and given.type == device_type and given.index is not None:
        return given
    index = int(module.current_device())
    local = environ.get("LOCAL_RANK", "")
    if index == 0 and local.isdigit() and int(local) < module.device_count():
        index = int(local)
    return torch.device(device_type, index)
