"""The libraries that the mock plays, and a backend for each, made once a process."""

from __future__ import annotations

from tests.mocks.nccl.backend import AtOnce, HostStreams, MockBackend, make
from unicomm import Communicator

KINDS = {
    "nccl-new": (23203, False),
    "nccl-one-sided": (22902, False),
    "nccl-shrinks": (22703, False),
    "nccl-old": (21805, False),
    "rccl-old": (22105, True),
}
_made: dict[str, type[MockBackend]] = {}


def of(name: str) -> type[MockBackend]:
    """The backend `name`, registered. Skips without a compiler."""
    if name not in _made:
        version, rccl = KINDS[name]
        _made[name] = make(name, version, rccl)
    return _made[name]


def streams_of(comm: Communicator) -> HostStreams:
    """The streams of a communicator on a mock device: the current one, new ones, and how to keep one busy."""
    backend = type(comm.unsafe_backend)
    assert issubclass(backend, AtOnce)
    return backend.device_streams(comm.get_device())
