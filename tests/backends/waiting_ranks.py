"""Programs of four ranks that wait for each other, and who has to be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import unicomm
from tests.threads import outcomes
from unicomm import Communicator, DeadlockError, ReduceOp
from unicomm.c10d.compat import HashStore

#: Takes seconds for its operation, None for the communicator's.
Program = Callable[[Communicator, float | None], object]


def ring(comm: Communicator, timeout: float | None) -> object:
    """Rank 3 waits for a member of the circle of the others."""
    rank = comm.get_rank()
    return comm.recv(torch.ones(3), (rank + 1) % 3 if rank < 3 else 0, timeout=timeout)


def message_and_collective(comm: Communicator, timeout: float | None) -> object:
    """Rank 0 waits for a message of rank 1, which waits with the others for rank 0."""
    if comm.get_rank() == 0:
        return comm.recv(torch.ones(3), 1, timeout=timeout)
    return comm.all_reduce(torch.ones(3), ReduceOp.SUM, timeout=timeout)


def asynchronous_ring(comm: Communicator, timeout: float | None) -> object:
    rank = comm.get_rank()
    return comm.recv(torch.ones(3), (rank + 1) % 3 if rank < 3 else 0, async_op=True, timeout=timeout).wait()


def batch_and_ring(comm: Communicator, timeout: float | None) -> object:
    """Rank 0 waits for messages of its host and of the other one at once."""
    if comm.get_rank() > 0:
        return ring(comm, timeout)
    batch = comm.batch_op_create()
    for peer in (1, 2, 3):
        batch.recv(torch.ones(3), peer)
    return batch.issue(False, timeout=timeout)


def message_and_list(comm: Communicator, timeout: float | None) -> object:
    """The same with a collective that Python code runs between hosts."""
    if comm.get_rank() == 0:
        return comm.recv(torch.ones(3), 1, timeout=timeout)
    parts = [torch.ones(3) for _ in range(comm.get_size())]
    return comm.all_gather(parts, torch.ones(3), timeout=timeout)


def name_every_member(
    job: Callable[[Communicator], object],
    members: set[int],
    backend: str,
    hints: Mapping[str, str | bool] | None,
    within: float = 60.0,
) -> Sequence[BaseException]:
    """Runs a job on four ranks, each of which has to name all `members`. Returns the errors of deadlocks."""
    store = HashStore()

    def run(rank: int) -> object:
        comm = unicomm.new_comm(
            backend, "cpu", name="c", store=store, rank=rank, size=4, timeout=30, hints=hints
        )
        comm.barrier()
        try:
            return job(comm)
        finally:
            comm.finalize()

    found = []
    for rank, error in enumerate(outcomes([lambda r=r: run(r) for r in range(4)], within)):
        if rank not in members and isinstance(error, unicomm.PeerLostError):
            continue  # it called late, when a member had left
        assert isinstance(error, DeadlockError), (rank, repr(error))
        assert members <= set(error.culprits), (rank, repr(error))
        assert len(error.culprits) >= 2
        assert "wait for each other" in str(error)
        assert "waiting_ranks.py:" in str(error)
        found.append(error)
    return found
