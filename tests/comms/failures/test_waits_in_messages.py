"""Ranks that wait in messages of a process group: which rank is named as the one that is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import unicomm
from tests.comms.inside import post
from tests.threads import outcomes
from tests.ucx_here import needs_ucx
from unicomm import CommTimeoutError, Communicator, DeadlockError, PeerLostError
from unicomm.c10d.compat import HashStore

BACKENDS = [("shm", None), ("gloo", None), ("auto", {"hosts": "a,b,c,d"})]
TRANSPORTS = [("tcp", None), pytest.param("ucx", None, marks=needs_ucx)]


def ranks(n: int, backend: str, hints: Any) -> list[Communicator]:
    store = HashStore()

    def make(rank: int) -> Communicator:
        return unicomm.new_comm(
            backend, "cpu", name="m", store=store, rank=rank, size=n, timeout=30, hints=hints
        )

    return outcomes([partial(make, r) for r in range(n)])


def receive(comm: Communicator, peer: int) -> None:
    post(comm, "recv", torch.zeros(1), peer).wait()


def without_rank_2(
    first: Callable[[], object], second: Callable[[], object], last: Callable[[], object]
) -> list[Any]:
    """Runs the jobs of the ranks 0, 1 and 3, while rank 2 does nothing until rank 1 has given up."""
    over = threading.Event()

    def second_and_over() -> None:
        try:
            second()
        finally:
            over.set()

    return outcomes([first, second_and_over, lambda: over.wait(30), last])


@pytest.mark.parametrize(("backend", "hints"), BACKENDS)
def test_the_ranks_that_wait_for_the_late_one_are_not_named(backend, hints):
    """Rank 2 is late. Rank 0 waits for a message of it, rank 3 for one of rank 0; rank 1 gives up."""
    comms = ranks(4, backend, hints)
    got = without_rank_2(
        lambda: receive(comms[0], 2),
        lambda: comms[1].barrier(timeout=1.5),
        lambda: receive(comms[3], 0),
    )
    for rank in (0, 1, 3):
        assert type(got[rank]) is CommTimeoutError, repr(got[rank])
        assert got[rank].culprits == (2,), repr(got[rank])
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "hints"), [*BACKENDS, ("auto", {"hosts": "a,a,b"})])
def test_a_receive_that_no_thread_waits_for_is_no_wait(backend, hints):
    """Rank 0 has posted one and computes: it is the one that is missing in rank 1's barrier."""
    comms = ranks(3, backend, hints)
    over, posted = threading.Event(), threading.Event()
    works: list[Any] = []

    def computes() -> None:
        works.append(post(comms[0], "recv", torch.zeros(1), 2))
        posted.set()
        over.wait(30)

    def waits(rank: int) -> None:
        posted.wait(30)
        try:
            comms[rank].barrier(timeout=1.5)
        finally:
            over.set()

    got = outcomes([computes, partial(waits, 1), partial(waits, 2)])
    for error in got[1:]:
        assert type(error) is CommTimeoutError, repr(error)
        assert error.culprits == (0,), repr(error)
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "hints"), BACKENDS[1:])
def test_a_circle_of_messages_is_named_whole(backend, hints):
    """Ranks 0 and 2 wait for each other's message, and rank 1 finds that at its own deadline."""
    comms = ranks(3, backend, hints)
    jobs = [
        lambda: receive(comms[0], 2),
        lambda: comms[1].barrier(timeout=1.5),
        lambda: receive(comms[2], 0),
    ]
    for error in outcomes(jobs):
        assert type(error) is DeadlockError, repr(error)
        assert error.culprits == (0, 2)
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "hints"), BACKENDS)
def test_a_message_of_a_batch_that_is_through_is_no_wait(backend, hints):
    """Rank 0 has received from rank 3, and waits for more; rank 3 waits for rank 2, which is late.

    Rank 1 gives up. All it hears from rank 3 is that one of two messages is not over.
    """
    comms = ranks(4, backend, hints)

    def first() -> None:
        comms[0].recv(torch.zeros(1), 3)
        comms[0].recv(torch.zeros(1), 3)

    got = without_rank_2(
        first,
        lambda: comms[1].recv(torch.zeros(1), 0, timeout=1.5),
        lambda: comms[3].batch_op_create().send(torch.zeros(1), 0).recv(torch.zeros(1), 2).issue(False),
    )
    for rank in (0, 1, 3):
        assert type(got[rank]) is CommTimeoutError, repr(got[rank])
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize(("backend", "hints"), [*BACKENDS, *TRANSPORTS])
def test_a_message_to_a_rank_that_has_finalized_blames_no_other(backend, hints, eventually):
    """Rank 1 takes its message and finalizes, too, while rank 0 looks for the cause."""
    comms = ranks(3, backend, hints)
    comms[2].finalize()
    if backend != "shm":  # whose native code hears of it by itself
        eventually(lambda: 2 in comms[0].unsafe_backend.channel._left)
    tried = threading.Event()

    def sends() -> None:
        try:
            for work in [post(comms[0], "send", torch.zeros(1), peer) for peer in (1, 2)]:
                work.wait()
        finally:
            tried.set()

    def takes() -> None:
        try:
            receive(comms[1], 0)
        except PeerLostError:  # rank 0 has given up before it sent
            tried.wait(30)
        comms[1].finalize()

    error, _ = outcomes([sends, takes])
    assert type(error) is PeerLostError, repr(error)
    assert error.culprits == (2,)
    assert error.message == "rank 2 has finalized this communicator"
    comms[0].finalize()


@pytest.mark.parametrize("n", [3, 100_000])
@pytest.mark.parametrize(("backend", "hints"), [BACKENDS[0], BACKENDS[2], *TRANSPORTS])
def test_what_a_rank_sent_before_it_finalized_arrives_first(backend, hints, n, eventually):
    """A second receive never gets a message. Gloo is left out: its send waits for the receive."""
    comms = ranks(2, backend, hints)

    def sends() -> None:
        comms[1].send(torch.ones(n), 0)
        comms[1].finalize()

    def takes() -> None:
        if backend != "shm" and n == 3:  # such a message is sent although nobody has come for it
            eventually(lambda: 1 in comms[0].unsafe_backend.channel._left)
        x = torch.zeros(n)
        first, second = (post(comms[0], "recv", to, 1) for to in (x, torch.zeros(n)))
        with pytest.raises(PeerLostError, match="rank 1 has finalized this communicator"):
            second.wait()
        first.wait()
        assert x.tolist() == [1.0] * n

    assert outcomes([sends, takes]) == [None, None]
    comms[0].finalize()
