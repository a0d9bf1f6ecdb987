"""Puts the simulated primitives into the modules under test, and takes them out again.

Nothing of the product knows of the simulation. A module's names `threading`, `time`, `queue`, `socket`,
`selectors` and `secrets` are replaced, as well as what a module has once per process, so that simulated
processes do not share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from unicomm.backends import registry
from unicomm.backends.gloo import backend as gloo_backend
from unicomm.backends.out_of_band import channel_thread, fault_channel
from unicomm.c10d import compat
from unicomm.comms.execution import engine, message_queue
from unicomm.comms.failures import daemon_pool, open_communicators, store_requests
from unicomm.comms.membership import create, endpoint, rendezvous
from unicomm.comms.membership.environment import Environment

from . import primitives
from .network import sim_selectors, sim_socket
from .simulated_library import SimulatedBackend
from .simulated_store import Local, Prefixed, base_store

_REPLACED = {
    id(threading): primitives.sim_threading,
    id(time): primitives.sim_time,
    id(queue): primitives.sim_queue,
    id(secrets): primitives.sim_secrets,
    id(socket): sim_socket,
    id(selectors): sim_selectors,
    id(compat.HashStore): Local,
    id(compat.PrefixStore): Prefixed,
    id(compat.base_store): base_store,
}
_LOCK = type(threading.Lock())
_PACKAGES = ("unicomm.comms", "unicomm.backends.out_of_band", "unicomm.backends.gloo")


class _Recorder:
    """A recorder that keeps nothing: the rings are not part of the protocols."""

    @staticmethod
    def add_comm(**_: object) -> int:
        return 0

    @staticmethod
    def begin(*_: object) -> int:
        return 0

    @staticmethod
    def start(_: int) -> None: ...

    @staticmethod
    def finish(*_: object) -> None: ...

    @staticmethod
    def set_sender(*_: object) -> None: ...

    @staticmethod
    def set_comm_state(*_: object) -> None: ...


class _NoCounting:
    """`ctypes`, for a backend that keeps Gloo's group for ever by its reference count."""

    pythonapi = SimpleNamespace(Py_IncRef=lambda _: None)
    py_object = id


def _environment(rank: int | None, size: int | None) -> Environment:
    return Environment(rank or 0, size or 1, None, None, "simulation", "")


def _place(_: int) -> str:
    return f"program.py:{primitives.current_process().number} in rank"


def _notes_its_time(step: Callable[..., bytes]) -> Callable[..., bytes]:
    """`Rendezvous._run`, which notes when the process has come to the step."""

    def run(self: Any, header: Any, value: bytes, combine: Any, what: str) -> bytes:
        primitives.current_process().owned.get("reached", {})[what] = primitives.current().now
        return step(self, header, value, combine, what)

    return run


def _with_simulated_locks(cls: type) -> Callable[..., None]:
    """The `__init__` of a dataclass whose fields may be locks, which the class makes by itself."""
    plain = cls.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        plain(self, *arguments, **named)
        for name, value in list(vars(self).items()):
            if isinstance(value, _LOCK):
                object.__setattr__(self, name, primitives.Lock())

    return init


def _processes() -> Iterator[tuple[Any, str, Any]]:
    """What tells of other processes of the host: the simulated ones have numbers from 1 on, in no /proc."""
    if (processes := sys.modules.get("unicomm.comms.membership.processes")) is not None:
        yield processes, "scope", lambda: "00" * 8
        yield processes, "status", lambda pid: ["S", *["1"] * 30]
        yield processes, "os", primitives.Facade(os, getpid=lambda: primitives.current_process().number + 1)
        yield processes, "lives", lambda pid, ticks: not primitives.current().is_dead(pid - 1)
    if (faults := sys.modules.get("unicomm.comms.membership.meeting_faults")) is not None:
        # It looks at the threads of the real process.
        yield faults, "thread_quiescence", SimpleNamespace(threads_that_stay=lambda *_: None)


def _changes() -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: (owner, attribute, replacement)."""
    for module, attribute, make in (
        (channel_thread, "current", channel_thread.ChannelThread),
        (message_queue, "_hand_over", message_queue._HandOver),
        (rendezvous, "_left_behind", set),
    ):
        yield module, attribute, primitives.PerProcess(attribute, make, getattr(module, attribute))
    yield create, "recorder_of", lambda world: _Recorder
    yield create.dumps, "prepare", lambda: None
    yield engine, "explain", lambda error, uid: None
    yield fault_channel, "where_is", _place
    yield rendezvous.Rendezvous, "_run", _notes_its_time(rendezvous.Rendezvous._run)
    yield endpoint, "network", lambda: "one host"
    yield endpoint.Guest, "__hash__", lambda guest: guest.socket.number
    yield gloo_backend, "ctypes", _NoCounting
    yield registry, "_environment", _environment
    yield open_communicators, "_open", set()
    yield (
        store_requests,
        "_requests",
        weakref.WeakKeyDictionary(),
    )  # which the end of the process goes through
    yield from _processes()
    pools: dict[int, primitives.PerProcess] = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_PACKAGES) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if (replacement := _REPLACED.get(id(value))) is not None:
                yield module, attribute, replacement
            elif isinstance(value, daemon_pool.DaemonPool):
                make = partial(daemon_pool.DaemonPool, attribute)
                yield module, attribute, pools.setdefault(id(value), primitives.PerProcess(name, make, value))
            elif (
                isinstance(value, type)
                and value.__module__ == name
                and dataclasses.is_dataclass(value)
                and any(field.default_factory is threading.Lock for field in dataclasses.fields(value))
            ):
                yield value, "__init__", _with_simulated_locks(value)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within the block the modules under test run over the simulation."""
    before: list[tuple[Any, str, Any]] = []
    registered = dict(registry._registered)
    registry._registered["simulated"] = SimulatedBackend
    try:
        for owner, attribute, value in list(_changes()):
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)
        registry._registered.clear()
        registry._registered.update(registered)
