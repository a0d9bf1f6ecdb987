"""Failures where hosts are several: every rank raises the same, and knows the ranks of the communicator."""

import threading
from functools import partial

import pytest
import torch

import unicomm
from tests.threads import results
from unicomm.backends.shm import ShmBackend
from unicomm.comms.failures.first_cause import FirstCause
from unicomm.testing import run_ranks

pytestmark = pytest.mark.usefixtures("between")

SUM = unicomm.ReduceOp.SUM
LAYOUTS = ["a,a,b,b", "a,b,a,b", "a,b,b,c", "a,a,a,b"]


def told(comm, act):
    """What `act` raises, in words that can be compared between ranks."""
    try:
        act()
    except unicomm.CommError as error:
        return type(error).__name__, error.culprits, error.message
    return "nothing"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [8, 4096, 100_000])
def test_mismatch_is_told_before_anything_is_written(layout, count):
    def program(comm):
        me, x = comm.get_rank(), torch.full((count,), 2.0)
        odd = x if me != 2 else torch.full((count + 1,), 2.0)
        whole, parts = torch.full((4 * count,), 7.0), torch.full((4 * count,), 2.0)
        few = 4 if me == 1 else 4 * count  # which travel by other ways
        said = [
            told(comm, lambda: comm.all_reduce(odd, SUM, False)),
            told(comm, lambda: comm.barrier(False) if me == 1 else comm.all_gather_single(whole, x, False)),
            told(comm, lambda: comm.broadcast(x, 1 if me == 3 else 0, False)),
            told(comm, lambda: comm.reduce(x, 0, unicomm.ReduceOp.MAX if me == 0 else SUM, False)),
            told(comm, lambda: comm.all_to_all_single(whole[:few], parts[:few], False)),
        ]
        assert torch.all(x == 2)
        assert torch.all(odd == 2)
        assert torch.all(whole == 7)
        comm.all_reduce(x, SUM, False)  # all are in step
        assert torch.all(x == 8)
        return said

    said = run_ranks(program, 4, backend="auto", hints={"hosts": layout})
    assert all(one == said[0] for one in said)
    assert [one[:2] for one in said[0]] == [("MismatchError", (r,)) for r in (2, 1, 3, 0, 1)]
    assert f"rank 2: all_reduce(float32[{count + 1}], SUM)" in said[0][0][2]
    assert "rank 1: barrier()" in said[0][1][2]
    assert "rank 3: broadcast" in said[0][2][2]
    assert "rank 0: reduce" in said[0][3][2]
    assert "rank 1: all_to_all_single(float32[4])" in said[0][4][2]


@pytest.mark.parametrize("layout", ["a,a,b,b", "a,b,b"])
def test_sizes_that_do_not_fit_between_hosts(layout):
    """all_to_all says in no signature what each rank gets; the ranks compare it."""
    n = layout.count(",") + 1

    def program(comm):
        me = comm.get_rank()
        outs = [torch.zeros(3) for _ in range(n)]
        ins = [torch.ones(4 if (me, to) == (0, n - 1) else 3) for to in range(n)]
        said = told(comm, lambda: comm.all_to_all(outs, ins, False))
        comm.barrier(False)
        return said

    said = run_ranks(program, n, backend="auto", hints={"hosts": layout})
    assert {one[:2] for one in said} == {("MismatchError", (0, n - 1))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("count", [4, 100_000])
def test_a_rank_that_does_not_come(layout, absent, count):
    over = threading.Barrier(4)

    def program(comm):
        comm.barrier(False)
        said = None
        if comm.get_rank() != absent:
            said = told(comm, lambda: comm.all_reduce(torch.ones(count), SUM, False, timeout=1.5))
            assert comm.is_aborted()
        over.wait(60)
        return said

    said = run_ranks(program, 4, backend="auto", hints={"hosts": layout})
    others = [one for rank, one in enumerate(said) if rank != absent]
    assert all(one == others[0] for one in others)
    assert others[0][:2] == ("CommTimeoutError", (absent,))
    assert f"rank {absent} had not arrived" in others[0][2]


def test_a_rank_that_stops_while_its_host_connects(monkeypatch):
    """Who waits for the whole host must not blame the ranks that wait for that rank."""
    over = threading.Barrier(3)
    connect = ShmBackend.connect

    def stops(setup):
        if setup.labels[setup.rank] == 2:
            over.wait(60)
        return connect(setup)

    monkeypatch.setattr(ShmBackend, "connect", stops)
    store = torch.distributed.HashStore()

    def program(rank):
        options = {"store": store, "rank": rank, "size": 3, "timeout": 10, "hints": {"hosts": "a,b,a"}}
        with pytest.raises(unicomm.CommError) as caught:
            unicomm.new_comm("auto", "cpu", **options)
        if rank != 2:
            over.wait(60)
        return type(caught.value).__name__, caught.value.culprits

    assert results([partial(program, rank) for rank in range(3)])[:2] == [("CommTimeoutError", (2,))] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_abort_ends_all_ranks(layout, eventually):
    waiting = [False] * 4

    def program(comm):
        me = comm.get_rank()
        comm.barrier(False)
        if me == 3:
            eventually(lambda: all(waiting[:3]))
            comm.abort()
            return told(comm, lambda: comm.barrier(False))
        waiting[me] = True
        return told(comm, lambda: comm.all_reduce(torch.ones(4), SUM, False))

    said = run_ranks(program, 4, backend="auto", hints={"hosts": layout})
    assert [one[:2] for one in said] == [("AbortedError", (3,))] * 4
    assert [one[2] for one in said[:3]] == ["rank 3 aborted the communicator"] * 3


def test_a_rank_that_aborts_and_cannot_tell_the_store_is_named(monkeypatch):
    """As one without memory for the thread that asks the store. Rank 0 waits for its host's rank 1 then."""
    publish = FirstCause.publish
    monkeypatch.setattr(
        FirstCause,
        "publish",
        lambda first, error: error if error.culprits == (2,) and first._rank == 2 else publish(first, error),
    )
    waiting, over = threading.Event(), threading.Event()

    def program(comm):
        me = comm.get_rank()
        if me == 0:
            waiting.set()
        elif me == 1:
            assert over.wait(60)
        else:
            assert waiting.wait(60)
            comm.abort()
        try:
            return told(comm, lambda: comm.broadcast(torch.zeros(4), 1, False))
        finally:
            over.set()

    for name, culprits, text in run_ranks(program, 3, backend="auto", timeout=60, hints={"hosts": "a,a,b"}):
        assert (name, culprits) == ("AbortedError", (2,)), text


@pytest.mark.parametrize("layout", ["a,a,b,b", "a,b,b,c"])
def test_a_rank_that_finalizes_too_early_is_named(layout):
    def program(comm):
        comm.barrier(False)
        if comm.get_rank() == 3:
            comm.finalize()
            return None
        return told(comm, lambda: comm.all_reduce(torch.ones(4), SUM, False))

    said = run_ranks(program, 4, backend="auto", hints={"hosts": layout})
    assert {one[:2] for one in said[:3]} == {("PeerLostError", (3,))}


def test_ranks_of_one_host_that_wait_for_each_other():
    """The host's shared memory finds the circle; every rank raises it with the communicator's ranks."""
    known = threading.Barrier(4)

    def program(comm):
        me = comm.get_rank()
        if me in (1, 3):  # on host b, where they are ranks 0 and 1
            said = told(comm, lambda: comm.recv(torch.zeros(1), 4 - me, False))
            known.wait(60)
            return said
        known.wait(60)
        return told(comm, lambda: comm.barrier(False))

    said = run_ranks(program, 4, backend="auto", hints={"hosts": "a,b,a,b"}, timeout=60)
    assert [one[:2] for one in said] == [("DeadlockError", (1, 3))] * 4
    for _, _, text in said:
        assert "these ranks wait for each other forever" in text
        assert "rank 1 in recv from rank 3" in text
        assert "rank 3 in recv from rank 1" in text
