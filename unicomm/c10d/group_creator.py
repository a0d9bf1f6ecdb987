"""The creator function of the backend name "unicomm": how `init_process_group("unicomm")` makes a group.

    dist.init_process_group("unicomm")
    dist.init_process_group("cpu:unicomm,cuda:nccl")     # torch's NCCL for CUDA tensors

UNICOMM_BACKEND chooses the unicomm backend; the default is "auto". `pg_options` may be a dict of the
backend's hints, with `"enable_reconfigure": "true"` for a group whose ranks may change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from unicomm.backends.registry import connect
from unicomm.comms.communicator import Communicator, communicator_of
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.options import Hint, parse_bool, read_hints

from . import choice
from .choice import NAME
from .compat import PrefixStore, backend_of_group, registered_backend, set_timeout_of_options
from .mixed_group import MixedProcessGroup
from .plugins import call_creator
from .process_group import UnicommProcessGroup
from .subgroups import meeting_place

_OPTION = Hint("enable_reconfigure", parse_bool, False, "Whether the group's ranks may change later.")


def read_options(given: Any) -> tuple[dict[str, str | bool], bool]:
    """Returns the hints in `pg_options`, and whether the group's ranks may change."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"pg_options is a {type(given).__name__}", hint="for the backend unicomm pass a dict of hints"
        )
    hints = dict(given or {})
    settings = read_hints({_OPTION.name: hints.pop(_OPTION.name, "false")}, [_OPTION], NAME)
    return hints, bool(settings[_OPTION.name])


def create(
    options: Any, hints: Mapping[str, str | bool] | None, asked: Mapping[str, Any]
) -> UnicommProcessGroup:
    """torch's creator function (`Backend.register_backend`, extended form). Called by each member.

    `asked`: the variables of torch's function that makes the group (`compat.GROUP_MAKER_VARIABLES`).
    """
    own, changes = read_options(hints)
    config = asked.get("backend_config")
    wanted = {"cpu": NAME} if config is None else dict(config.get_device_backend_map())
    here = [kind for kind, backend in wanted.items() if backend == NAME and _has_backend(kind)]
    ours = [kind for kind in here if choice.is_asked_for(kind, asked)]
    if not ours:
        raise UnsupportedError(
            f"this machine has no device of {', '.join(k for k, b in wanted.items() if b == NAME)}",
            hint="name the devices: init_process_group('cpu:unicomm,cuda:nccl')",
        )
    place = meeting_place(
        options.global_ranks_in_group, asked.get("group_desc"), str(options.group_id), options.store
    )
    comms = [
        communicator_of(
            connect(
                choice.chosen_backend(NAME, kind),
                _device(kind, asked),
                place.name,
                store=PrefixStore(f"unicomm-{kind}", place.store),
                timeout=options.timeout,
                rank=options.group_rank,
                size=options.group_size,
                enable_reconfigure=changes,
                hints=own,
                meeting=place.meeting,
                labels=options.global_ranks_in_group or None,
            ),
            Communicator,
        )
        for kind in ours
    ]
    for comm in comms:
        choice.bind(comm, asked.get("device_id"))
    others = {kind: backend for kind, backend in wanted.items() if backend != NAME}
    if not others:
        return UnicommProcessGroup(*comms, store=options.store)
    made = asked.get("pg")
    return MixedProcessGroup(
        *comms,
        others={kind: _torch_backend(kind, backend, options, made) for kind, backend in others.items()},
        store=options.store,
    )


def _device(kind: str, asked: Mapping[str, Any]) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return choice.device_of(kind, asked.get("device_id"), os.environ, torch.get_device_module(kind))


def _has_backend(kind: str) -> bool:
    """Whether this machine has a device of the type `kind` and unicomm a backend for it."""
    return choice.is_present(kind) and choice.chosen_backend(NAME, kind) != NAME


def _torch_backend(kind: str, backend: str, options: Any, made: Any) -> Any:
    """Returns torch's own backend for a device type: that of the group `made`, or a new one."""
    device = torch.device(kind)
    if made is not None and (found := backend_of_group(made, device)) is not None:
        return found
    store = PrefixStore(f"{kind}/", options.store)
    rank, size = options.group_rank, options.group_size
    if backend == dist.Backend.GLOO:
        return dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    if backend == dist.Backend.NCCL and dist.is_nccl_available():
        settings = dist.ProcessGroupNCCL.Options()
        set_timeout_of_options(settings, options.timeout)
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        return dist.ProcessGroupNCCL(store, rank, size, settings)
    plugin = registered_backend(backend)
    if plugin is None:
        raise UnsupportedError(
            f"torch's backend '{backend}' cannot be combined with unicomm in one group",
            hint="use gloo, nccl or a registered backend for the other devices",
        )
    return call_creator(plugin, store, options, None)
