"""Connecting Gloo's group without Gloo's own waiting for ranks that do not come.

Gloo asks a store where the others are, and waits there for them, for ever or until a timeout that names
nobody. So Gloo gets a store of this process alone. The ranks exchange what Gloo put there through the
rendezvous, which knows who is missing; only then does Gloo find it and connect. It connects in another
thread, because it cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import patience
from unicomm.c10d.compat import HashStore
from unicomm.comms.backend import Setup
from unicomm.comms.errors import BackendError, CommError, first_line
from unicomm.comms.failures.thread_start import start

from .connections import Pairs, listening_address

_LOOK = 0.2  # seconds between two checks whether a rank has left
_LOCAL = 10.0  # seconds for Gloo to publish its address, which needs no other rank
_AT_MOST = 15.0, 0.05  # seconds for connecting once all ranks have come: in all, and for each rank
_DESCRIPTORS = 12  # besides those for each peer
_HINT = "check that the ranks reach each other; choose the interface by the hint 'interface'"


class Connecting:
    """Gloo's group of one communicator.

    Attributes:
        group: the connected group; None if `trouble` says why it is not connected.
        pairs: its connections; None if they cannot be told from others.
    """

    def __init__(self, setup: Setup, sockets: int) -> None:
        """Collective. `sockets`: the number of sockets that each peer needs besides Gloo's.

        Raises `BackendError` if this rank cannot take part; the rendezvous tells the others.
        """
        self.group: Any = None
        self.trouble = ""
        self.pairs: Pairs | None = None
        self._setup = setup
        self._store = HashStore()
        self._over = threading.Event()
        if setup.size > 1:
            _need_descriptors(setup, (sockets + 1) * setup.size + _DESCRIPTORS)
        try:
            self._options = _options(setup)
        except CommError:
            raise  # an error of the ranks, not of Gloo
        except (RuntimeError, OSError) as error:
            raise self._failed(first_line(error)) from error
        self._store.set_timeout(self._options._timeout)  # the store's own default is minutes
        if setup.size == 1:
            self._run()
        else:
            start(threading.Thread(target=self._run, name="unicomm-gloo-connect", daemon=True))
            self._introduce()
            self._wait()
        if self.trouble and setup.size == 1:
            raise self._failed(self.trouble)

    def _run(self) -> None:
        try:
            self.group = dist.ProcessGroupGloo(self._store, self._setup.rank, self._setup.size, self._options)
        except RuntimeError as error:
            self.trouble = first_line(error)
        del self._options
        self._over.set()

    def _introduce(self) -> None:
        """Exchanges what Gloo has to know of the other ranks."""
        setup = self._setup
        end = time.monotonic() + _LOCAL
        while not self._store.check([_key(setup.rank)]):
            if self._over.wait(0.001) or time.monotonic() > end:
                raise self._failed(self.trouble or "it does not say where it listens")
        blob = bytes(self._store.get(_key(setup.rank)))
        own = listening_address(blob)
        post = json.dumps({"gloo": blob.hex(), "address": own}).encode()
        posts = [json.loads(text) for text in setup.rendezvous.exchange("gloo addresses", post)]
        places = [one["address"] for one in posts]
        if None not in places and own is not None:
            others = frozenset((host, port) for r, (host, port) in enumerate(places) if r != setup.rank)
            self.pairs = Pairs(own, others)
        for rank, one in enumerate(posts):
            if rank != setup.rank:
                self._store.set(_key(rank), bytes.fromhex(one["gloo"]))  # type: ignore[arg-type]

    def _wait(self) -> None:
        end = time.monotonic() + patience(self._setup.rendezvous)
        try:
            while not self._over.wait(_LOOK):
                self._setup.rendezvous.check()
                if time.monotonic() > end:
                    self.trouble = "it did not connect in time"
                    break
        finally:
            if not self._over.is_set():
                # Gloo goes on to its own timeout, five times; without these keys it tries no further peers.
                for rank in range(self._setup.size):
                    self._store.delete_key(_key(rank))

    def _failed(self, why: str) -> BackendError:
        return BackendError(f"gloo could not connect: {why}", comm=self._setup.name, hint=_HINT)


def _key(rank: int) -> str:
    return f"0/{rank}"


def _options(setup: Setup) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    least, for_each = _AT_MOST
    seconds = min(patience(setup.rendezvous), least + for_each * setup.size)
    options._timeout = timedelta(seconds=max(0.1, seconds))
    host, interface = setup.hints["hostname"], setup.hints["interface"]
    if not host and not interface and setup.size > 1:
        host = addresses.listen_address(setup.rendezvous, setup.store)
    if host or interface:
        device = dist.ProcessGroupGloo.create_device(hostname=host, interface=interface, lazy_init=False)
    else:
        device = dist.ProcessGroupGloo.create_default_device(lazy_init=False)
    options._devices = [device]
    return options


def _need_descriptors(setup: Setup, count: int) -> None:
    """Raises `BackendError` if there are too few: later this rank would fail while the others wait for it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + count > limit:
        raise BackendError(
            f"gloo needs some {count} file descriptors for {setup.size} ranks; {used} of {limit} are in use",
            comm=setup.name,
            culprits=[setup.rendezvous.labels[setup.rank]],
            hint="raise the limit (ulimit -n), or finalize communicators that are not used any more",
        )
