"""Messages that do not fit their receive: which side raises, on which backends (docs/failures.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unicomm
from tests.backends.hosts.between import BETWEEN
from tests.threads import outcomes
from unicomm import Communicator, MismatchError
from unicomm.c10d.compat import HashStore

SMALL, LARGE = 100, 1 << 20  # elements; a large message is on its way until its receiver takes it
ONE_EACH = {"hosts": "a,b"}  # `auto` is then the backend between the hosts
SEVERAL = {"hosts": "a,a,b,b"}  # and here `hosts`
GLOO = {"between": "gloo"}


def ranks(backend: str, hints: Any) -> list[Communicator]:
    size = len(hints["hosts"].split(",")) if hints else 2
    store = HashStore()

    def make(rank: int) -> Communicator:
        return unicomm.new_comm(
            backend, "cpu", name="sizes", store=store, rank=rank, size=size, timeout=20, hints=hints
        )

    return outcomes([lambda r=r: make(r) for r in range(size)])


@pytest.mark.parametrize("sent", [SMALL, LARGE])
@pytest.mark.parametrize("expected", ["shorter", "longer", "other type"])
@pytest.mark.parametrize(
    ("backend", "hints", "receiver", "moved_by"),
    [
        ("shm", None, 1, "shm"),
        ("gloo", None, 1, "gloo"),
        ("tcp", None, 1, "tcp"),
        ("ucx", None, 1, "ucx"),
        ("auto", ONE_EACH, 1, BETWEEN),
        ("auto", ONE_EACH | GLOO, 1, "gloo"),
        ("auto", SEVERAL, 1, "shm"),
        ("auto", SEVERAL, 2, BETWEEN),
        ("auto", SEVERAL | GLOO, 1, "shm"),
        ("auto", SEVERAL | GLOO, 2, "gloo"),
    ],
)
def test_who_raises(backend, hints, receiver, moved_by, sent, expected):
    comms = ranks(backend, hints)
    if hints and hints["hosts"] == SEVERAL["hosts"]:
        assert comms[0].get_backend() == "hosts"
    dtype = torch.int32 if expected == "other type" else torch.float32
    n = {"shorter": sent // 2, "longer": 2 * sent, "other type": sent}[expected]
    got = torch.zeros(n, dtype=dtype)
    sends, receives = outcomes(
        [lambda: comms[0].send(torch.ones(sent), receiver), lambda: comms[receiver].recv(got, 0)], within=40
    )
    if expected == "other type" and moved_by != "shm":  # not compared
        assert [type(work) for work in (sends, receives)] == [unicomm.Work] * 2
        check_usable(comms)
        return
    assert isinstance(receives, MismatchError), repr(receives)
    assert receives.culprits == (0, receiver)
    # Shared memory has a small message as soon as it is copied; a transport any one that it can take.
    if moved_by in ("tcp", "ucx") or (moved_by == "shm" and sent == SMALL):
        assert isinstance(sends, unicomm.Work), repr(sends)
    else:
        assert isinstance(sends, MismatchError), repr(sends)
    # A transport compares sizes when a message is there: a shorter one has been written by then.
    written = sent if moved_by in ("tcp", "ucx") and expected == "longer" else 0
    assert got.count_nonzero() == written
    if moved_by == "shm":
        check_usable(comms)
    else:
        check_broken(comms, (0, receiver))


def check_usable(comms: list[Communicator]) -> None:
    for done in outcomes([lambda c=c: c.barrier() for c in comms]):
        assert isinstance(done, unicomm.Work), repr(done)
    for comm in comms:
        comm.finalize()


def check_broken(comms: list[Communicator], culprits: tuple[int, ...]) -> None:
    """Each rank raises the mismatch, whatever it calls: also those that have not seen the message."""
    for done in outcomes([lambda c=c: c.barrier() for c in comms]):
        assert isinstance(done, MismatchError), repr(done)
        assert done.culprits == culprits
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize("between", [{}, GLOO])
def test_ranks_that_wait_within_their_hosts_hear_of_it(between):
    """The ranks beside the two ends wait in a barrier, for a rank of their own host."""
    comms = ranks("auto", SEVERAL | between)
    got = torch.zeros(SMALL // 2)

    def send() -> None:
        comms[0].send(torch.ones(SMALL), 2)
        comms[0].barrier()  # with UCX the send is complete

    told = outcomes(
        [
            send,
            comms[1].barrier,
            lambda: comms[2].recv(got, 0),
            comms[3].barrier,
        ],
        within=40,
    )
    for error in told:
        assert isinstance(error, MismatchError), repr(error)
        assert error.culprits == (0, 2)
    check_broken(comms, (0, 2))
