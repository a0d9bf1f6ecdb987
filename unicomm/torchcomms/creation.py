"""new_comm with torchcomms' signature, and what a program asks about backends.

    torchcomms' backend                              unicomm's
    gloo, and every other one on the CPU             auto
    nccl, ncclx, rccl, rcclx, mccl, on a GPU         nccl, or rccl with ROCm
    a name that unicomm knows, such as shm or mpi    the same
    an entry point of the group torchcomms.backends  the class that it names, if it is a unicomm backend

UNICOMM_BACKEND chooses another one for torchcomms' names, as it does for torch.distributed (c10d/choice.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import torch

from unicomm.backends import registry
from unicomm.backends.registry import backend_names, connect, find_backend
from unicomm.c10d import choice
from unicomm.c10d.compat import Store
from unicomm.comms.backend import Backend
from unicomm.comms.communicator import communicator_of
from unicomm.comms.errors import InvalidArgumentError, NotReadyError, UnsupportedError
from unicomm.comms.failures import open_communicators
from unicomm.comms.options import COMMON_HINTS, parse_bool

from .communicator import TorchComm

ENTRY_POINTS = "torchcomms.backends"
#: torchcomms' own backends, and the device that each needs.
_THEIRS = {
    "gloo": "cpu",
    "nccl": "cuda",
    "ncclx": "cuda",
    "rccl": "cuda",
    "rcclx": "cuda",
    "mccl": "cuda",
    "xccl": "xpu",
}
#: Hints of torchcomms' backends. Where unicomm's backend does not know them they mean nothing.
_THEIR_HINTS = ("hostname", "interface", "lazy")
_THEIR_PREFIX = "torchcomm::"
#: Hint of the backend gloo: the variable that sets it.
_GLOO_VARIABLES = {"hostname": "TORCHCOMM_GLOO_HOSTNAME", "interface": "TORCHCOMM_GLOO_INTERFACE"}


class UnknownBackendError(InvalidArgumentError, ModuleNotFoundError):
    """There is no backend of that name: torchcomms raises `ModuleNotFoundError`."""


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | float | None = None,
    high_priority_stream: bool | None = None,
    store: Store | None = None,
    enable_reconfigure: bool = False,
    hints: Mapping[str, str] | None = None,
) -> TorchComm:
    """Creates a communicator of all ranks of the job. Called by all of them, with the same arguments.

    Args:
        backend, device, name, timeout, store, enable_reconfigure: see `unicomm.new_comm`, and the top of this
            file for the names of backends.
        abort_process_on_timeout_or_error: end the process when the communicator breaks, instead of raising.
            Default: TORCHCOMM_ABORT_ON_ERROR, else whether the device is a GPU: torchcomms' gloo, too, never
            ends the process.
        high_priority_stream: accepted; unicomm's streams have the default priority.
        hints: options of the backend. Those of torchcomms' backends that unicomm's does not know mean
            nothing; any other unknown one raises `InvalidArgumentError`.

    Raises what `unicomm.new_comm` raises. An unknown backend raises `ModuleNotFoundError`.
    """
    device = torch.device(device)
    chosen = _chosen(backend, device.type)
    if abort_process_on_timeout_or_error is None:
        abort_process_on_timeout_or_error = _aborts_by_default(device)
    created = connect(
        chosen,
        device,
        name,
        abort_process_on_timeout_or_error=abort_process_on_timeout_or_error,
        timeout=timeout,
        store=store,
        enable_reconfigure=enable_reconfigure,
        hints=_known_hints(find_backend(chosen), chosen, hints),
    )
    return communicator_of(created, TorchComm)


def _chosen(backend: str, device_type: str) -> str:
    """Returns unicomm's backend for the backend that a program names."""
    if backend in _THEIRS:
        return choice.chosen_backend(backend, device_type)
    if backend not in backend_names():
        _load(backend)
    return backend


def _load(name: str) -> None:
    """Registers the backend of an entry point of torchcomms' group."""
    found = list(entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        known = ", ".join(sorted({*_THEIRS, *backend_names()}))
        raise UnknownBackendError(f"failed to find backend {name}", hint=f"known: {known}")
    loaded = found[0].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise UnsupportedError(
            f"the entry point {found[0].value} of backend '{name}' is no unicomm backend",
            hint="backends that are compiled for torchcomms run with torchcomms only",
        )
    register_backend(name, loaded)


def register_backend(name: str, backend_class: type[Backend]) -> None:
    """See `unicomm.register_backend`: the class is a backend of unicomm's protocol."""
    registry.register_backend(name, backend_class)


def _aborts_by_default(device: torch.device) -> bool:
    text = os.environ.get("TORCHCOMM_ABORT_ON_ERROR", "")
    if not text:
        return device.type != "cpu"
    try:
        return parse_bool(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"TORCHCOMM_ABORT_ON_ERROR={text!r}: {error}", hint="set it to 0 or 1, or unset it"
        ) from None


def _known_hints(found: type[Backend], name: str, hints: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the hints for unicomm's backend: without those that only a backend of torchcomms has."""
    known = {hint.name for hint in (*COMMON_HINTS, *found.capabilities.hints)}
    made = {}
    if name == "gloo":
        made = {hint: os.environ[v] for hint, v in _GLOO_VARIABLES.items() if os.environ.get(v)}
    for hint, text in (hints or {}).items():
        theirs = hint in _THEIR_HINTS or str(hint).startswith(_THEIR_PREFIX)
        if hint in known or not theirs:
            made[hint] = text
    return made


def is_backend_built(name: str) -> bool:
    """Whether this machine can make communicators of the backend: it is known, and its device is there."""
    if name in _THEIRS:
        return choice.is_present(_THEIRS[name])
    if name in backend_names():
        return any(choice.is_present(kind) for kind in find_backend(name).capabilities.device_types)
    return bool(entry_points(group=ENTRY_POINTS, name=name))


def is_backend_registered(name: str) -> bool:
    """Whether `new_comm` knows the backend."""
    return name in _THEIRS or name in backend_names()


def get_mem_allocator(backend: str) -> Any:
    """Returns `TorchComm.get_mem_allocator()` of an open communicator of that backend.

    Raises `NotReadyError` if this process has none.
    """
    ours = choice.chosen_backend(backend, _THEIRS[backend]) if backend in _THEIRS else backend
    for comm in open_communicators.every():
        if isinstance(comm, TorchComm) and ours in (comm.get_backend(), comm._member.asked_for.name):
            return comm.get_mem_allocator()
    raise NotReadyError(
        f"this process has no open communicator of backend '{backend}'",
        hint="make one first, or call get_mem_allocator() of the communicator",
    )
