"""`init_process_group("unicomm")`, without the switch: how torch.distributed makes groups of ours.

    dist.init_process_group("unicomm")
    dist.init_process_group("cpu:unicomm,cuda:nccl")     # torch's NCCL for CUDA tensors

`UNICOMM_BACKEND` chooses what stands behind the name; without it that is "auto". `pg_options` may be a dict
of the backend's hints, with `"enable_reconfigure": "true"` for a group whose ranks may change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from unicomm.backends.registry import new_comm
from unicomm.comms.errors import InvalidArgumentError, UnsupportedError
from unicomm.comms.options import Hint, parse_bool, read_hints
from unicomm.flight_recorder.texts import format_ranks

from .devices import bind, chosen_backend, device_of, is_present
from .process_group import UnicommProcessGroup
from .switch import NAME

_OPTION = Hint("enable_reconfigure", parse_bool, False, "Whether the group's ranks may change later.")


def create(options: Any, hints: Mapping[str, str] | None, caller: Mapping[str, Any]) -> UnicommProcessGroup:
    """torch's creator function (`Backend.register_backend`, extended form). Called by each member.

    `caller`: the variables of torch's function that makes the group.
    """
    if hints is not None and not isinstance(hints, Mapping):
        raise InvalidArgumentError(
            f"pg_options is a {type(hints).__name__}", hint="for the backend unicomm pass a dict of hints"
        )
    config = caller.get("backend_config")
    wanted = {"cpu": NAME} if config is None else dict(config.get_device_backend_map())
    here = [kind for kind, backend in wanted.items() if backend == NAME and _present(kind)]
    ours = [kind for kind in here if _wanted(kind, caller)]
    if not ours:
        raise UnsupportedError(
            f"this machine has no device of {', '.join(k for k, b in wanted.items() if b == NAME)}",
            hint="name the devices: init_process_group('cpu:unicomm,cuda:nccl')",
        )
    name, store = _meeting_place(options)
    own = dict(hints or {})
    asked = read_hints({_OPTION.name: own.pop(_OPTION.name, "false")}, [_OPTION], NAME)
    comms = [
        new_comm(
            chosen_backend(NAME, kind),
            _device(kind, caller),
            name=name,
            store=PrefixStore(f"unicomm-{kind}", store),
            timeout=options.timeout,
            rank=options.group_rank,
            size=options.group_size,
            enable_reconfigure=asked[_OPTION.name],
            hints=own,
        )
        for kind in ours
    ]
    for comm in comms:
        bind(comm, caller.get("device_id"))
    others = {kind: backend for kind, backend in wanted.items() if backend != NAME}
    if not others:
        return UnicommProcessGroup(*comms, store=options.store)
    from .mixed_group import MixedProcessGroup

    made = caller.get("pg")
    return MixedProcessGroup(
        *comms,
        others={kind: _stock(kind, backend, options, made) for kind, backend in others.items()},
        store=options.store,
    )


def _device(kind: str, caller: Mapping[str, Any]) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return device_of(kind, caller.get("device_id"), os.environ, torch.get_device_module(kind))


def _meeting_place(options: Any) -> tuple[str, Store]:
    """A name and a store that all members know, and nobody else.

    torch's name for a group counts the groups that a rank knows, and its store carries that name. Ranks that
    know different numbers of groups, because some of them made one of their own before, would wait for each
    other in different places, as with torch's own backends. The ranks are what all members agree on.
    """
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        return str(options.group_id), options.store
    store = options.store
    for prefix in ("{device}/", "{group}/"):
        if not isinstance(store, PrefixStore):
            raise AssertionError(f"torch put no prefix {prefix} before the keys of {store}")
        store = store.underlying_store
    return f"ranks {format_ranks(ranks)}", PrefixStore("unicomm-groups", store)


def _present(kind: str) -> bool:
    """Whether tensors can be on that kind of device, and a backend for it is there."""
    return is_present(kind) and chosen_backend(NAME, kind) != NAME


def _wanted(kind: str, caller: Mapping[str, Any]) -> bool:
    """Whether a group that is asked for by the mere name shall have a communicator for that kind of device.

    It connects at once, each rank on a GPU of its own: so the program has to have said something of GPUs.
    """
    given = caller.get("device_id")
    named = ":" in str(caller.get("backend", "")) or (given is not None and given.type == kind)
    return kind == "cpu" or named or torch.get_device_module(kind).is_initialized()


def _stock(kind: str, backend: str, options: Any, made: Any) -> Any:
    """torch's own backend for a device type: the one it has just made, or a new one, which it has not yet."""
    device = torch.device(kind)
    if made is not None and device in made._device_types:
        return made._get_backend(device)
    store = PrefixStore(f"{kind}/", options.store)
    rank, size = options.group_rank, options.group_size
    if backend == dist.Backend.GLOO:
        return dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    if backend == dist.Backend.NCCL and dist.is_nccl_available():
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        settings.global_ranks_in_group = options.global_ranks_in_group
        settings.group_name = options.group_id
        return dist.ProcessGroupNCCL(store, rank, size, settings)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise UnsupportedError(
            f"torch's backend '{backend}' cannot be combined with unicomm in one group",
            hint="use gloo, nccl or a registered backend for the other devices",
        )
    if plugin.extended_api:
        return plugin.creator_fn(options, None)
    return plugin.creator_fn(store, rank, size, options.timeout)
