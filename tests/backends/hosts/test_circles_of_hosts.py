"""Ranks that wait for each other, within hosts and between: at the first deadline every member is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unicomm
from tests.backends.hosts.between import use
from tests.threads import outcomes
from unicomm import Communicator, DeadlockError, ReduceOp
from unicomm.c10d.compat import HashStore

SHORT, LONG = 1.5, 50.0  # seconds that an operation may take

Program = Callable[[Communicator], object]


def ring(comm: Communicator) -> object:
    """Rank 3 waits for a member of the circle of the others."""
    rank = comm.get_rank()
    return comm.recv(torch.ones(3), (rank + 1) % 3 if rank < 3 else 0)


def asynchronous_ring(comm: Communicator) -> object:
    rank = comm.get_rank()
    return comm.recv(torch.ones(3), (rank + 1) % 3 if rank < 3 else 0, async_op=True).wait()


def batch_and_ring(comm: Communicator) -> object:
    """Rank 0 waits for messages of its host and of the other one at once."""
    if comm.get_rank() > 0:
        return ring(comm)
    batch = comm.batch_op_create()
    for peer in (1, 2, 3):
        batch.recv(torch.ones(3), peer)
    return batch.issue(False)


def message_and_collective(comm: Communicator) -> object:
    """Rank 0 waits for a message of rank 1, which waits with the others for rank 0."""
    if comm.get_rank() == 0:
        return comm.recv(torch.ones(3), 1)
    return comm.all_reduce(torch.ones(3), ReduceOp.SUM)


def message_and_list(comm: Communicator) -> object:
    """The same with a collective that Python code runs between hosts."""
    if comm.get_rank() == 0:
        return comm.recv(torch.ones(3), 1)
    parts = [torch.ones(3) for _ in range(comm.get_size())]
    return comm.all_gather(parts, torch.ones(3))


@pytest.mark.parametrize("between", ["ucx", "gloo"])
@pytest.mark.parametrize(
    ("layout", "short"),
    [
        ("a,a,b,b", {0, 1, 2, 3}),
        ("a,a,b,b", {1}),
        ("a,b,a,b", {0}),
        ("a,b,a,b", {2}),
        ("a,b,b,b", {0}),
        ("a,b,b,b", {1}),
    ],
    ids=lambda value: value if isinstance(value, str) else f"deadline of {value}",
)
@pytest.mark.parametrize(
    ("program", "members"),
    [
        (ring, {0, 1, 2}),
        (asynchronous_ring, {0, 1, 2}),
        (batch_and_ring, {0, 2}),
        (message_and_collective, {0}),
        (message_and_list, {0}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_member_is_named(
    program: Program,
    members: set[int],
    layout: str,
    short: set[int],
    between: str,
    monkeypatch: pytest.MonkeyPatch,
):
    use(between, monkeypatch)
    store = HashStore()

    def job(rank: int) -> object:
        comm = unicomm.new_comm(
            "auto", "cpu", name="c", store=store, rank=rank, size=4, timeout=30, hints={"hosts": layout}
        )
        comm.barrier()
        comm.set_timeout(SHORT if rank in short else LONG)
        try:
            return program(comm)
        finally:
            comm.finalize()

    for rank, error in enumerate(outcomes([lambda r=r: job(r) for r in range(4)], LONG)):
        if rank not in members and isinstance(error, unicomm.PeerLostError):
            continue  # it called late, when a member had left
        assert isinstance(error, DeadlockError), (rank, repr(error))
        assert members <= set(error.culprits), (rank, repr(error))
        assert len(error.culprits) >= 2
        assert "wait for each other" in str(error)
        assert "test_circles_of_hosts.py:" in str(error)
        for part in ("in barrier", "in reduce", "in all_gather_v"):
            assert part not in str(error), "no operation of the program"
