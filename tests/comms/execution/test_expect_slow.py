"""expect_slow: a rank that asks for time gets it from all the others, and no more than it asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.backends.hosts.between import use
from tests.comms.inside import post
from unicomm import CommTimeoutError, Communicator, InvalidArgumentError, PeerLostError, ReduceOp
from unicomm.backends.hosts import backend as hosts
from unicomm.backends.out_of_band import fault_channel
from unicomm.comms.errors import AbortedError
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
SHORT = 0.05  # seconds that operations may take
SOON = 10.0  # what a loaded machine may take on top


@pytest.fixture(params=["shm", "gloo", "tcp"])
def backend(request):
    return request.param


@pytest.fixture(params=["shm", "gloo", "tcp", "hosts over tcp", "hosts over gloo"])
def backend_of_three(request, monkeypatch):
    """With several hosts, ranks 1 and 2 share one, on which one waits for the one that waits for rank 0."""
    if request.param.startswith("hosts"):
        use(request.param.split()[-1], monkeypatch)
        monkeypatch.setattr(hosts, "_FOR_OTHERS", SHORT)
    return request.param


def three_ranks(program: Callable[[Communicator], None], backend: str) -> None:
    hints = {"hosts": "a,b,b"} if backend.startswith("hosts") else None
    run_ranks(program, 3, backend="auto" if hints else backend, hints=hints, timeout=60)


def wait(comm: Communicator, kind: str, limit: float) -> None:
    """Ranks 1 and 2 wait for rank 0, each for at most `limit` seconds."""
    x = torch.ones(70001)
    if kind == "sync":
        comm.all_reduce(x, SUM, False, timeout=limit)
    elif kind == "async":
        comm.all_reduce(x, SUM, True, timeout=limit).wait()
    elif kind == "recv":
        comm.recv(x, 0, False, timeout=limit)
    elif kind == "send":
        comm.send(torch.ones(2_000_000), 0, False, timeout=limit)
    else:
        post(comm, "recv", x, 0, limit).wait()


def come(comm: Communicator, kind: str) -> None:
    """Rank 0's part of it."""
    comm.set_timeout(60)
    if kind in ("sync", "async"):
        comm.all_reduce(torch.ones(70001), SUM, False)
        return
    for peer in (1, 2):
        if kind == "send":
            comm.recv(torch.ones(2_000_000), peer, False)
        else:
            comm.send(torch.ones(70001), peer, False)


@pytest.mark.parametrize("kind", ["sync", "async", "recv", "send", "lane"])
def test_the_others_wait(kind, backend_of_three, eventually):
    """In operations that begin later, for longer than these may take."""
    began: list[float] = []

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            with comm.expect_slow("checkpoint", 50):
                comm.barrier(False)  # what is announced before a collective is known after it
                eventually(lambda: len(began) == 2)
                while time.monotonic() < max(began) + 4 * SHORT:
                    time.sleep(SHORT)
            come(comm, kind)
            return
        comm.barrier(False)
        if backend_of_three.startswith(
            "hosts"
        ):  # where it may come a moment later to ranks that wait in memory
            channel = comm.unsafe_backend._far.channel
            eventually(channel.patience)
            channel.catch_up()  # and has told the other parts
        began.append(time.monotonic())
        wait(comm, kind, SHORT)

    three_ranks(program, backend_of_three)


@pytest.mark.parametrize("kind", ["sync", "lane"])
def test_the_others_wait_where_they_are(kind, backend_of_three, eventually):
    """In operations under way, if the rank asks while it has the time to."""
    began: list[float] = []
    limit = 3.0  # a busy machine may take long to ask

    def program(comm: Communicator) -> None:
        comm.barrier(False)
        if comm.get_rank() == 0:
            eventually(lambda: len(began) == 2)
            with comm.expect_slow("checkpoint", 50):
                while time.monotonic() < max(began) + limit + 4 * SHORT:
                    time.sleep(SHORT)
                come(comm, kind)
            return
        began.append(time.monotonic())
        wait(comm, kind, limit)

    three_ranks(program, backend_of_three)


def test_no_longer_than_asked_for(backend, raised, monkeypatch):
    # Rank 0 answers. If a busy machine lets it answer late, the error does not say what it had asked for.
    monkeypatch.setattr(fault_channel, "ANSWER", 30.0)
    away = threading.Event()  # rank 0 has left the barrier; a rank that is still in it is late, not absent
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            with comm.expect_slow("checkpoint", 6 * SHORT):
                comm.barrier(False)
                away.set()
                assert over.wait(60)
            return
        comm.barrier(False)
        assert away.wait(60)
        began = time.monotonic()
        error = raised(comm.all_reduce, torch.ones(4), SUM, False, timeout=SHORT)
        assert type(error) is CommTimeoutError
        assert error.culprits == error.absent == (0,)
        assert time.monotonic() - began < 6 * SHORT + SOON
        if backend == "gloo":
            assert "it had asked for time, for 'checkpoint'" in error.message
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_asked_for_time_lasts_as_long_as_said(backend, raised):
    """The clock of the one who asks binds: the others' error comes after its time, never before."""
    asked: list[float] = []
    over = threading.Event()

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            asked.append(time.monotonic())
            with comm.expect_slow("checkpoint", 10 * SHORT):
                comm.barrier(False)
                assert over.wait(60)
            return
        comm.barrier(False)
        assert type(raised(comm.barrier, False, timeout=SHORT)) is CommTimeoutError
        assert time.monotonic() - asked[0] >= 10 * SHORT
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("end", ["abort", "finalize"])
def test_other_errors_do_not_wait(end, backend, raised):
    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            with comm.expect_slow("checkpoint", 50):
                comm.barrier(False)
                if end == "abort":
                    comm.abort()
                else:
                    comm.finalize()
            return
        began = time.monotonic()
        comm.barrier(False)
        error = raised(comm.barrier, False, timeout=50)
        assert type(error) is (AbortedError if end == "abort" else PeerLostError)
        assert error.culprits == (0,)
        assert time.monotonic() - began < SOON

    run_ranks(program, 2, backend=backend, timeout=60)


def test_blocks_in_blocks(backend, raised):
    """The one that ends last counts, and when all are over, nothing does but the operations' own time."""
    asked: list[float] = []
    over = threading.Event()

    def program(comm: Communicator) -> None:
        comm.set_timeout(SHORT)
        if comm.get_rank() == 0:
            asked.append(time.monotonic())
            with comm.expect_slow("outer", 10 * SHORT):
                with comm.expect_slow("inner", 50):
                    pass
                comm.barrier(False, timeout=60)
            assert over.wait(60)
            return
        comm.barrier(False, timeout=60)
        began = time.monotonic()
        assert type(raised(comm.barrier, False)) is CommTimeoutError
        assert time.monotonic() - began < SOON
        over.set()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_bad_arguments(raised):
    def program(comm: Communicator) -> None:
        def ask(*arguments: object) -> None:
            with comm.expect_slow(*arguments):
                raise AssertionError("the block runs")

        for arguments in (("x", 0), ("x", -1), ("x", "long"), (3, 5), ("x", None)):
            error = raised(ask, *arguments)
            assert type(error) is InvalidArgumentError, repr(error)
            assert error.hint
        comm.barrier(False)

    run_ranks(program, 2)
