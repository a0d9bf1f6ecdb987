"""`auto`: the fastest backend that reaches all ranks of the communicator.

CPU tensors: shared memory when all ranks share a host, else Gloo. Decided anew for each communicator, so that
a split whose ranks share a host uses shared memory also where its parent cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from unicomm.comms.backend import Backend, Capabilities, Setup
from unicomm.comms.call import Message
from unicomm.comms.options import read_hints

from .gloo import GlooBackend
from .shm import ShmBackend, host_identity


class AutoBackend(Backend):
    """Only its `connect` is ever called: it returns the backend that was chosen."""

    name = "auto"
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        hints=(*ShmBackend.capabilities.hints, *GlooBackend.capabilities.hints),
    )

    @classmethod
    def connect(cls, setup: Setup) -> Backend:
        hosts = setup.rendezvous.exchange("auto", host_identity().encode())
        # The host's name may differ between containers of one host; what follows it may not.
        one_host = len({host.split(b" ", 1)[1] for host in hosts}) == 1
        chosen: type[Backend] = ShmBackend if one_host else GlooBackend
        known = {hint.name for hint in chosen.capabilities.hints}
        hints = read_hints(None, chosen.capabilities.hints, chosen.name)
        hints.update({k: v for k, v in setup.hints.items() if k in known})
        return chosen.connect(replace(setup, hints=hints))

    def exchange(self, messages: Sequence[Message], timeout: float) -> NoReturn:
        raise AssertionError("auto is never connected itself")

    def abort(self) -> NoReturn:
        raise AssertionError("auto is never connected itself")

    def close(self) -> NoReturn:
        raise AssertionError("auto is never connected itself")
