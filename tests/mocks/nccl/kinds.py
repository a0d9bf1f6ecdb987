"""The libraries that the double plays, and a backend for each, made once a process."""

from __future__ import annotations

from tests.mocks.nccl.backend import DoubleBackend, HostStreams, make
from unicomm import Communicator

KINDS = {
    "nccl-new": (23203, False),
    "nccl-one-sided": (22902, False),
    "nccl-shrinks": (22703, False),
    "nccl-old": (21805, False),
    "rccl-old": (22105, True),
}
_made: dict[str, type[DoubleBackend]] = {}


def of(name: str) -> type[DoubleBackend]:
    """The backend `name`, registered. Skips without a compiler."""
    if name not in _made:
        version, rccl = KINDS[name]
        _made[name] = make(name, version, rccl)
    return _made[name]


def streams(comm: Communicator) -> HostStreams:
    queue = comm._engine.executor
    assert queue is not None
    assert isinstance(queue.streams, HostStreams)
    return queue.streams
