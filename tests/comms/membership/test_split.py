"""split: communicators of some ranks, in any order, that need nobody else."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import pytest
import torch

import unicomm
from tests.comms.calls import check_sum
from tests.comms.inside import store
from unicomm import AbortedError, CommTimeoutError, Communicator, NotReadyError, PeerLostError, ReduceOp
from unicomm.comms.membership import create
from unicomm.comms.membership.rendezvous_parts import digest
from unicomm.flight_recorder.texts import format_ranks
from unicomm.testing import run_ranks

SUM = ReduceOp.SUM
both_backends = pytest.mark.parametrize("backend", ["shm", "gloo", "tcp"])


def check_members(child: Communicator, labels: list[int]) -> None:
    """The child's ranks are `labels` of the job, in that order."""
    assert child.get_size() == len(labels)
    assert child.get_ranks() == labels
    mine = torch.tensor([labels[child.get_rank()]])
    everyone = torch.zeros(len(labels), dtype=torch.int64)
    child.all_gather_single(everyone, mine, False)
    assert everyone.tolist() == labels


@both_backends
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0], [1, 3, 0], [3]])
def test_order(backend, ranks):
    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        child = comm.split(ranks if me in ranks else [], "child")
        if child is None:
            assert me not in ranks
            return
        assert child.get_rank() == ranks.index(me)
        assert child.get_name() == "child"
        assert child.get_backend() == backend
        check_members(child, ranks)
        child.finalize()

    run_ranks(program, 4, backend=backend)


@both_backends
def test_nobody_else_has_to_call(backend):
    """Ranks that are no members call nothing; those that pass [] get None before any member comes."""
    asked = threading.Event()

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        if me == 2:
            assert comm.split([]) is None
            assert comm.split((), name="whatever", timeout=1) is None
            asked.set()
        elif me < 2:
            assert asked.wait(20)
            child = comm.split([1, 0])
            assert child is not None
            check_members(child, [1, 0])
            child.finalize()
        check_sum(comm)

    run_ranks(program, 4, backend=backend)


def test_kinds_of_lists():
    def program(comm: Communicator) -> None:
        for ranks in (range(2), (0, 1), np.array([0, 1]), list(np.array([0, 1])), torch.tensor([0, 1])):
            child = comm.split(ranks)
            assert child is not None
            check_members(child, [0, 1])
            child.finalize()

    run_ranks(program, 2)


def test_names():
    def program(comm: Communicator) -> None:
        children = [comm.split([2, 1, 0]), comm.split([0, 1, 2], ""), comm.split([0, 1, 2], "x")]
        assert [c.get_name() for c in children] == ["ranks_0", "ranks_0", "x"]
        assert len({c.get_uid() for c in [comm, *children]}) == 4
        uids = [""] * 3
        for i, child in enumerate(children):
            text = torch.tensor(list(child.get_uid().encode()), dtype=torch.uint8)
            everyone = torch.zeros(3 * len(text), dtype=torch.uint8)
            child.all_gather_single(everyone, text, False)
            assert bytes(everyone.tolist()).decode() == 3 * child.get_uid()
            uids[i] = child.get_uid()
            child.finalize()

    run_ranks(program, 3)


@both_backends
def test_nested(backend):
    """Labels are the ranks of the whole job, however deep."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        if me == 0:
            return
        child = comm.split([3, 1, 2], "child")
        assert child is not None
        check_members(child, [3, 1, 2])
        if me != 1:
            grandchild = child.split([2, 0], "child")
            assert grandchild is not None
            check_members(grandchild, [2, 3])
            alone = grandchild.split([grandchild.get_rank()])
            assert alone is not None
            check_members(alone, [me])
            assert alone.get_name() == f"child_{grandchild.get_rank()}"
            alone.finalize()
            grandchild.finalize()
        child.finalize()

    run_ranks(program, 4, backend=backend)


def test_one_name_again_and_again():
    """By the same ranks, by others at the same time, and by ranks of which some have split before."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        halves = [[0, 1], [2, 3]]
        for _ in range(5):
            half = comm.split(halves[me // 2], "group")
            assert half is not None
            check_members(half, halves[me // 2])
            if me < 2:
                extra = comm.split([1, 0], "group")
                assert extra is not None
                check_members(extra, [1, 0])
                extra.finalize()
            everyone = comm.split([0, 1, 2, 3], "group")
            assert everyone is not None
            check_members(everyone, [0, 1, 2, 3])
            half.finalize()
            everyone.finalize()

    run_ranks(program, 4)


@both_backends
def test_a_child_outlives_its_parent(backend, raised):
    def program(comm: Communicator) -> None:
        child = comm.split([1, 0])
        assert child is not None
        comm.finalize()
        check_sum(child)
        assert type(raised(comm.split, [0, 1])) is NotReadyError
        grandchild = child.split([0, 1])
        assert grandchild is not None
        child.finalize()
        check_sum(grandchild)
        grandchild.finalize()

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize(
    ("backend", "hints"), [("shm", None), ("gloo", None), ("tcp", None), ("auto", {"hosts": "a,a,b"})]
)
def test_a_rank_that_has_finalized_the_parent_does_not_break_it(backend, hints, raised):
    """A split with it fails, and the ranks that are left go on."""
    left = threading.Event()

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        if me == 1:
            comm.finalize()
            left.set()
            return
        assert left.wait(60)
        if me == 0:
            error = raised(comm.split, [0, 1], "both")
            assert type(error) is PeerLostError, repr(error)
            assert error.culprits == (1,)
            assert error.message == "rank 1 has finalized this communicator"
        assert not comm.is_aborted()
        child = comm.split([0, 2], "others")
        assert child is not None
        check_members(child, [0, 2])
        child.finalize()
        x = torch.full((3,), float(me))
        comm.send(x, 2, False) if me == 0 else comm.recv(x, 0, False)
        assert x.tolist() == [0.0] * 3

    run_ranks(program, 3, backend=backend, hints=hints)


@both_backends
def test_communicators_do_not_wait_for_each_other(backend):
    """An operation of the parent hangs for want of a rank, and those of the child run."""
    done = threading.Barrier(3, timeout=20)

    def program(comm: Communicator) -> None:
        x = torch.ones(3)
        if comm.get_rank() == 2:
            done.wait()
            comm.all_reduce(x, SUM, False)
            return
        child = comm.split([0, 1])
        assert child is not None
        work = comm.all_reduce(x, SUM, True)
        works = [child.all_reduce(torch.ones(2), SUM, i % 2 == 0) for i in range(10)]
        works[-2].wait()
        check_sum(child)
        assert not work.is_completed()
        done.wait()
        work.wait()
        assert x.tolist() == [3.0] * 3
        child.finalize()

    run_ranks(program, 3, backend=backend)


def test_what_is_inherited():
    hints = {"slot_bytes": "8K", "p2p_bytes": "8K"}

    def program(comm: Communicator) -> None:
        comm.set_timeout(12)
        child = comm.split([0, 1])
        assert child is not None
        assert child.get_timeout() == child.get_options().timeout == 12
        assert child.get_options().hints == hints
        assert child.memory() == comm.memory()
        other = child.split([0, 1], timeout=timedelta(minutes=1), hints={"slot_bytes": "1M"})
        assert other is not None
        assert other.get_timeout() == 60
        assert other.get_options().hints == {"slot_bytes": "1M"}
        assert other.memory()["segment"] > 4 * 1024 * 1024
        plain = comm.split([0, 1], hints={})
        assert plain is not None
        assert plain.get_options().hints == {}
        for c in (child, other, plain):
            check_sum(c)
            c.finalize()

    run_ranks(program, 2, hints=hints)


def test_members_that_do_not_agree(raised):
    """Other lists are other groups: each waits for its own members, and says who is missing."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        ranks = [1, 0, 2] if me == 1 else [0, 1, 2]
        if me == 2:  # gives up when rank 0 has come
            group = f"g-{digest(repr(tuple(ranks)).encode()).hex()}"
            store(comm).wait([f"unicomm-split/{comm.get_uid()}/unicomm/child/{group}/0/0/0"])
        error = raised(comm.split, ranks, "child", timeout=60 if me == 0 else 0.1)
        assert type(error) is CommTimeoutError
        assert set(error.culprits) == ({0, 2} if me == 1 else {1})
        assert (error.op, error.comm) == ("split", "child")
        check_sum(comm)

    run_ranks(program, 3)


def test_the_fake_backend():
    comm = unicomm.new_comm("fake", torch.device("cpu"), rank=2, size=1000)
    child = comm.split([5, 2, 7], "child")
    assert child is not None
    assert (child.get_rank(), child.get_size(), child.get_ranks()) == (1, 3, [5, 2, 7])
    child.barrier(False)


def test_overlapping_groups():
    """Pairs around a ring: each rank is in two of them, and each makes them in an order of its own."""

    def program(comm: Communicator) -> None:
        me, n = comm.get_rank(), comm.get_size()
        for ranks in ([0, 1], [1, 2], [2, 3], [0, 3]):
            if me in ranks:
                with comm.split(ranks, "pair") as child:
                    check_members(child, ranks)
        assert n == 4

    run_ranks(program, 4)


@both_backends
def test_a_rank_without_memory_after_the_meeting_tells_the_others(backend, raised, monkeypatch):
    """The others are connected: if they heard nothing, they would wait for it until their deadline."""
    this = threading.local()

    def format_without_memory(labels):
        if getattr(this, "poor", False):
            raise MemoryError
        return format_ranks(labels)

    monkeypatch.setattr(create, "format_ranks", format_without_memory)

    def program(comm: Communicator) -> None:
        this.poor = comm.get_rank() == 1
        if this.poor:
            with pytest.raises(MemoryError):
                comm.split([0, 1, 2], "child")
            this.poor = False
            return
        child = comm.split([0, 1, 2], "child")
        assert child is not None
        error = raised(child.barrier, False)
        assert isinstance(error, AbortedError), repr(error)
        assert error.culprits == (1,)
        child.finalize()

    run_ranks(program, 3, backend=backend)
