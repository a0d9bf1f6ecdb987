"""Whether a rank has come to an operation, as the other ranks see it.

A test that gives one rank a short timeout calls on that rank when the others have come: a loaded machine may
start them later than any timeout.
"""

from __future__ import annotations

import os

from tests.wait_tables import waits
from unicomm import Communicator
from unicomm.backends.shm import ShmBackend


def in_operation(comm: Communicator) -> bool:
    """Whether the rank waits in an operation and the others know it; on shared memory after 100 ms."""
    backend, me = comm.unsafe_backend, comm.get_rank()
    if isinstance(backend, ShmBackend):
        return (backend.group.id, me) in waits(os.getpid())
    return bool(backend.channel._here((me + 1) % comm.get_size()).inside)
