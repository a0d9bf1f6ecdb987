"""Backends that third parties have registered with torch.distributed (`Backend.register_backend`).

When the switch is on, torch asks `new_comm` for every backend, those of third parties included. A program
that names one of them means it: the switch makes it as torch would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .choice import NAME
from .compat import Store, backend_options, registered_backend


@dataclass
class Made:
    """What torch gets from `new_comm` in place of a communicator when a third party's backend is used.

    `group`: the backend or process group that torch gets when it wraps this.
    """

    group: Any
    _recorder_index: int = -1  # a recorder hook asks for it: the group has no records here

    @property
    def _recorder_indexes(self) -> set[int]:
        return {self._recorder_index}

    def finalize(self) -> None:
        """Does nothing: torch shuts its groups down after it has finalized communicators."""


#: Backends for which unicomm stands. From 2.14 on, torch registers them as others do, when first named.
_OF_TORCH = {"gloo", "mpi", "nccl", "ucc", "xccl"}


def is_third_party(backend: str) -> bool:
    """Whether `backend` is the name of a backend that somebody else has registered with torch."""
    plugin = None if backend == NAME else registered_backend(backend)
    if plugin is None:
        return False
    return backend not in _OF_TORCH or not str(plugin.creator_fn.__module__).startswith("torch.")


def make(backend: str, store: Store, asked: Mapping[str, Any]) -> Any:
    """Returns the backend, made as torch makes it.

    `asked`: the variables of torch's function that makes the group (`compat.GROUP_MAKER_VARIABLES`).
    """
    options = backend_options(store, asked)
    return call_creator(registered_backend(backend), store, options, asked.get("backend_options"))


def call_creator(plugin: Any, store: Store, options: Any, hints: Any) -> Any:
    """Calls the creator function that was registered, in the form that it was registered for.

    `options`: see `compat.backend_options`. `hints`: the `pg_options` of the program.
    """
    if plugin.extended_api:
        return plugin.creator_fn(options, hints)
    return plugin.creator_fn(store, options.group_rank, options.group_size, options.timeout)
