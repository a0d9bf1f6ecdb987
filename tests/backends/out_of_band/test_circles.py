"""Ranks that wait for each other out of band: at the deadline every member is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unicomm
from tests.threads import outcomes
from unicomm import Communicator, DeadlockError, ReduceOp
from unicomm.backends.out_of_band.circles import find_circle
from unicomm.c10d.compat import HashStore

BACKENDS = [("gloo", None), ("auto", {"hosts": "a,b,c,d"})]  # several ranks a host: test_circles_of_hosts.py


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ({0: [1], 1: [2], 2: [0]}, [0, 1, 2]),
        ({3: [1], 1: [2], 2: [1]}, [1, 2]),  # the asking rank waits for a circle
        ({0: [1, 2], 1: [], 2: [0]}, [0, 2]),
        ({0: [1], 1: [2]}, []),
        ({}, []),
    ],
)
def test_circles_of_waits(waits, circle):
    assert find_circle(waits, next(iter(waits), 0)) == circle


def ring(comm: Communicator, timeout: float) -> object:
    """Rank 3 waits for a member of the circle of the others."""
    rank = comm.get_rank()
    return comm.recv(torch.ones(3), (rank + 1) % 3 if rank < 3 else 0, timeout=timeout)


def message_and_collective(comm: Communicator, timeout: float) -> object:
    """Rank 0 waits for a message of rank 1, which waits with the others for rank 0."""
    if comm.get_rank() == 0:
        return comm.recv(torch.ones(3), 1, timeout=timeout)
    return comm.all_reduce(torch.ones(3), ReduceOp.SUM, timeout=timeout)


@pytest.mark.parametrize(("backend", "hints"), BACKENDS)
@pytest.mark.parametrize(("program", "members"), [(ring, {0, 1, 2}), (message_and_collective, {0})])
def test_every_member_is_named(
    backend: str, hints: Any, program: Callable[[Communicator, float], object], members: set[int]
):
    store = HashStore()

    def job(rank: int) -> object:
        comm = unicomm.new_comm(
            backend, "cpu", name="c", store=store, rank=rank, size=4, timeout=30, hints=hints
        )
        comm.barrier()
        try:
            return program(comm, 1.5)
        finally:
            comm.finalize()

    errors = outcomes([lambda r=r: job(r) for r in range(4)])
    for rank, error in enumerate(errors):
        if rank not in members and isinstance(error, unicomm.PeerLostError):
            continue  # it called late, when a member had left
        assert isinstance(error, DeadlockError), repr(error)
        assert members <= set(error.culprits), repr(error)
        assert len(error.culprits) >= 2
        assert "wait for each other" in str(error)
        assert "test_circles.py:" in str(error)
