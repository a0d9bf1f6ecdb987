"""Which unicomm backend and which device stand behind the names in a torch.distributed program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from unicomm.comms.communicator import Communicator

NAME = "unicomm"  # the backend's name in torch.distributed, also without the switch
CHOICE = "UNICOMM_BACKEND"


def chosen_backend(name: str, device_type: str) -> str:
    """Returns the unicomm backend for the backend `name` of a program, on a device type.

    The variable UNICOMM_BACKEND is either one backend, which serves the device types it supports, or a list
    by device type, such as "cpu:shm,cuda:nccl". Any other device type gets its default: "auto" on the CPU,
    NCCL or RCCL on GPUs. Raises `InvalidArgumentError` when the backend is unknown.
    """
    import torch

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
    """Whether this machine has a device of that type."""
    import torch

    module = getattr(torch, device_type, None)
    return device_type == "cpu" or bool(module is not None and module.is_available())


def is_asked_for(device_type: str, asked: Mapping[str, Any]) -> bool:
    """Whether the program wants a communicator for a device type. For groups of backends for several devices.

    A communicator for GPUs connects at once and needs one GPU a rank. The name "unicomm" alone, or no name at
    all, therefore includes GPUs only if the program passes `device_id` or has used them already. `asked`: the
    variables of torch's function that makes the group (`compat.GROUP_MAKER_VARIABLES`).
    """
    import torch

    given = asked.get("device_id")
    named = ":" in str(asked.get("backend", "")) or (given is not None and given.type == device_type)
    return device_type == "cpu" or named or bool(torch.get_device_module(device_type).is_initialized())


def device_of(
    device_type: str, given: torch.device | None, environ: Mapping[str, str], module: Any
) -> torch.device:
    """Returns this rank's device, with its index, which torch does not pass on.

    That is `given`, the program's `device_id`, if it has an index; else the current device, if the program
    has chosen one; else device LOCAL_RANK, if this process sees that many devices. Many programs choose their
    device after they make the group, and the first device cannot be meant for all ranks. `module`: torch's
    module for the device type.
    """
    import torch

    if given is not None and given.type == device_type and given.index is not None:
        return given
    index = int(module.current_device())
    local = environ.get("LOCAL_RANK", "")
    if index == 0 and local.isdigit() and int(local) < module.device_count():
        index = int(local)
    return torch.device(device_type, index)


def bind(comm: Communicator, given: torch.device | None) -> None:
    """Notes `given`, the program's `device_id`, on its communicator: torch uses it for groups made later.

    torch notes it on a group of its own, which unicomm's group replaces.
    """
    if given is not None and given.type == comm.get_device().type:
        comm.bound_device = given
