"""`init_process_group` with env:// and tcp:// ends within its timeout, if the group is to be unicomm's.

torch's constructor of the store waits without a limit of time for the name service, and for a process that
accepts connections at MASTER_PORT and answers nothing, such as a stopped rank 0. torch opens the store before
it calls the backend, so the limit is put around its own handlers. When the switch is on, it holds for every
group; else for programs that name the backend "unicomm", and torch's handlers serve all others untouched.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from .choice import NAME
from .compat import rendezvous_handlers

_SCHEMES = ("env", "tcp")
_init_process_group = inspect.unwrap(dist.init_process_group).__code__
_for_all = False  # whether the limit holds for groups of all backends


def install(for_all: bool) -> None:
    """Puts a deadline around torch's own handlers of env:// and tcp://.

    `for_all`: for groups of all backends, not of "unicomm" alone. It stays so.
    """
    global _for_all
    _for_all = _for_all or for_all
    handlers = rendezvous_handlers()
    for scheme in _SCHEMES:
        if getattr(handlers[scheme], "__module__", "").startswith("torch."):
            handlers[scheme] = _bounded(handlers[scheme])


def _bounded(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def bounded(url: str, timeout: timedelta, **more: Any) -> Iterator[Any]:
        host, port, rank = _place(url)
        if not host or not port:
            yield from original(url, timeout=timeout, **more)
            return
        yield _first(lambda left: next(original(url, timeout=left, **more)), host, port, rank, timeout)
        raise RuntimeError("the ranks do not meet again by this URL")

    def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[Any]:
        if _for_all or _asks_for_unicomm():
            return bounded(url, timeout, **more)
        return original(url, timeout=timeout, **more)

    return rendezvous


def _asks_for_unicomm() -> bool:
    """Whether `init_process_group`, which waits for the caller, was asked for "unicomm" on any device."""
    frame = sys._getframe(1)
    while frame.f_code is not _init_process_group:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return NAME in re.split("[:,]", str(frame.f_locals.get("backend")).lower())


def _first(
    meet: Callable[[timedelta], Any], host: str, port: int, rank: str, timeout: timedelta
) -> tuple[Any, int, int]:
    """Returns store, rank and size."""
    from unicomm.comms.errors import CommTimeoutError
    from unicomm.comms.failures.store_requests import StoreHost, host_at, set_host
    from unicomm.comms.membership import tcp_store

    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seconds = timeout.total_seconds()
    end = time.monotonic() + seconds
    try:
        tcp_store.resolve(host, port, seconds)
        left = timedelta(seconds=max(0.001, end - time.monotonic()))
        if (
            rank == "0" and not agent
        ):  # it answers itself, and waits for the others until torch's own deadline
            found = meet(left)
        else:
            found = tcp_store.within(left.total_seconds(), host, port, lambda: meet(left))
    except OSError as error:
        holder = "torchrun" if agent else "rank 0"
        raise CommTimeoutError(
            f"{holder}, which holds the store, did not answer at {host}:{port} within {seconds:g} s: {error}",
            op="init_process_group",
            rank=int(rank) if rank.isdecimal() else None,
            absent=[] if agent else [0],
            hint=f"see whether {holder} is stopped, and whether this host knows and reaches that address",
        ) from error
    known = host_at(host, port)
    set_host(found[0], known if agent else StoreHost(f"rank 0, which holds the store at {host}:{port}", 0))
    return found  # type: ignore[no-any-return]


def _place(url: str) -> tuple[str, int, str]:
    """Returns host and port of the store and this process's rank, as torch's handlers read them."""
    try:
        parsed = urlparse(url)
        asked = {name: values[0] for name, values in parse_qs(parsed.query).items()}
        rank = asked.get("rank", os.environ.get("RANK", ""))
        if parsed.scheme == "tcp":
            return parsed.hostname or "", parsed.port or 0, rank
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")), rank
    except ValueError:  # torch's handler says what is wrong
        return "", 0, ""
