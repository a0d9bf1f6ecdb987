"""Puts the simulated primitives into the modules under test, and takes them out again.

Nothing of the product knows of the simulation. A module's names `threading`, `time`, `queue`, `socket`,
`selectors` and `secrets` are replaced, as well as what a module has once per process, so that simulated
processes do not share it.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from unicomm.backends import registry
from unicomm.backends.gloo import backend as gloo_backend
from unicomm.backends.gloo import messages as gloo_messages
from unicomm.backends.out_of_band import channel_thread, fault_channel
from unicomm.comms.execution import engine, message_queue
from unicomm.comms.failures import daemon_pool, first_cause, open_communicators, store_client
from unicomm.comms.membership import create, endpoint, epoch, reconfigure_session, split
from unicomm.comms.membership.environment import Environment

from . import primitives
from .network import sim_selectors, sim_socket
from .simulated_library import SimulatedBackend
from .simulated_store import Local, Prefixed

_REPLACED = {
    id(threading): primitives.sim_threading,
    id(time): primitives.sim_time,
    id(queue): primitives.sim_queue,
    id(secrets): primitives.sim_secrets,
    id(socket): sim_socket,
    id(selectors): sim_selectors,
}
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
    def set_comm_state(*_: object) -> None: ...


class _NoCounting:
    """`ctypes`, for a backend that keeps Gloo's group for ever by its reference count."""

    pythonapi = SimpleNamespace(Py_IncRef=lambda _: None)
    py_object = id


def _state(*arguments: Any) -> epoch.ReconfigureState:
    # The factory of this field is a primitive of its own, which the class holds.
    return epoch.ReconfigureState(*arguments, busy=primitives.Lock())  # type: ignore[arg-type]


def _environment(rank: int | None, size: int | None) -> Environment:
    return Environment(rank or 0, size or 1, None, None, "simulation", "")


def _place(_: int) -> str:
    return f"program.py:{primitives.current_process().number} in rank"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within the block the modules under test run over the simulation."""
    waiters = primitives.PerProcess("waiters", lambda: daemon_pool.DaemonPool("unicomm-gloo"))
    changes: list[tuple[Any, str, Any]] = [
        (first_cause, "_pool", primitives.PerProcess("causes", lambda: daemon_pool.DaemonPool("causes"))),
        (gloo_messages, "waiters", waiters),
        (gloo_backend, "waiters", waiters),
        (channel_thread, "current", primitives.PerProcess("channels", channel_thread.ChannelThread)),
        (message_queue, "_hand_over", primitives.PerProcess("hand over", message_queue._HandOver)),
        (create, "recorder_of", lambda world: _Recorder),
        (create.dumps, "prepare", lambda: None),
        (create, "ReconfigureState", _state),
        (engine, "explain", lambda error, uid: None),
        (fault_channel, "where_is", _place),
        (split, "PrefixStore", Prefixed),
        (first_cause, "PrefixStore", Prefixed),
        (store_client, "HashStore", Local),
        (reconfigure_session, "HashStore", Local),
        (endpoint, "network", lambda: "one host"),
        (endpoint.Guest, "__hash__", lambda guest: guest.socket.number),
        (gloo_backend, "ctypes", _NoCounting),
        (registry, "_environment", _environment),
        (open_communicators, "_open", set()),
    ]
    for name, module in sorted(sys.modules.items()):
        if name.startswith(_PACKAGES) and module is not None:
            for attribute, value in list(vars(module).items()):
                if (replacement := _REPLACED.get(id(value))) is not None:
                    changes.append((module, attribute, replacement))
    before: list[tuple[Any, str, Any]] = []
    registered = dict(registry._registered)
    registry._registered["simulated"] = SimulatedBackend
    try:
        for owner, attribute, value in changes:
            before.append((owner, attribute, getattr(owner, attribute)))
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)
        registry._registered.clear()
        registry._registered.update(registered)
