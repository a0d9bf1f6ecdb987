"""reconfigure: the same communicator with other ranks. Real deaths are in processes/test_elastic.py."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
import torch

import unicomm
import unicomm.profiler
from tests.comms.membership.casts import LONG
from unicomm import (
    AbortedError,
    CommTimeoutError,
    Communicator,
    InvalidArgumentError,
    NotReadyError,
    PeerLostError,
    ReduceOp,
    UnsupportedError,
)
from unicomm.backends import registry
from unicomm.backends.fake import FakeBackend
from unicomm.comms.backend import Backend
from unicomm.comms.membership.handles import Handle

SUM = ReduceOp.SUM
BACKENDS = ["shm", "gloo", "tcp", "fake", "auto"]
REAL = ["shm", "gloo", "tcp"]


STEPS = {
    "shrink": ([0, 1, 2], [0, 2]),
    "shrink without the first": ([0, 1, 2], [1, 2]),
    "grow": ([0, 1], [0, 1, 2]),
    "grow in front": ([0, 1], [2, 0, 1]),
    "renumber": ([0, 1, 2], [2, 0, 1]),
    "same": ([0, 1, 2], [0, 1, 2]),
    "to one rank": ([0, 1, 2], [1]),
    "from one rank": ([1], [1, 0, 2]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks(backend, step, cast):
    before, after = STEPS[step]
    ranks = cast(backend, 3)
    ranks.become(before)
    uid = ranks.comms[after[0]].get_uid()
    ranks.become(after)
    assert ranks.comms[after[0]].get_uid() != uid
    for left in set(before) - set(after):
        ranks.comms[left].finalize()


def test_several_hosts(cast):
    """What auto makes of two hosts, which a hint says."""
    ranks = cast("auto", 4)
    ranks.become([0, 1, 2, 3], hints={"hosts": "a,a,b,b"})
    assert ranks.comms[0].get_backend() == "hosts"
    ranks.become([0, 2, 3], hints={"hosts": "a,a,b,b"})
    assert ranks.comms[0].get_backend() == "hosts"
    ranks.become([3, 2])
    assert ranks.comms[3].get_options().hints == {"hosts": "a,a,b,b"}
    assert ranks.comms[3].get_backend() == "shm"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_set(backend, cast):
    """All ranks put it into the same order."""
    cast(backend, 3).become([0, 1, 2], unordered=True)


def test_from_ranks_that_were_connected_at_once(cast):
    store = torch.distributed.HashStore()
    ranks = cast("shm", 1)

    def start(_: Communicator, i: int) -> Communicator:
        return unicomm.new_comm(
            "shm", "cpu", name="cast", store=store, rank=i - 1, size=2, enable_reconfigure=True, timeout=LONG
        )

    ranks.comms += [None, None]
    started = ranks.play([1, 2], start)
    ranks.comms[1:] = [started[1], started[2]]
    ranks.handles = [comm.get_init_handle() for comm in ranks.comms]
    ranks.play([1, 2], lambda comm, _: comm.barrier(False))
    ranks.become([2, 0, 1])
    # Numbers in the job stay with the processes: those that were connected at once have theirs.
    assert ranks.comms[0].get_ranks() == [1, 2, 0]


def test_numbers_in_the_job_stay(cast):
    """Each process has one number for good, which the recorder's readers go by."""
    ranks = cast("shm", 4)
    ranks.become([0, 1, 2])
    assert ranks.comms[2].get_ranks() == [0, 1, 2]
    ranks.become([2, 1])
    assert ranks.comms[2].get_ranks() == [2, 1]
    ranks.become([2, 3, 1])
    assert ranks.comms[1].get_ranks() == [2, 3, 1]


def test_split_of_an_epoch(cast):
    ranks = cast("shm", 3)
    ranks.become([2, 1, 0])

    def act(comm: Communicator, i: int) -> Any:
        child = comm.split([0, 2] if comm.get_rank() != 1 else [])
        if child is None:
            return None
        with child, pytest.raises(UnsupportedError, match="without enable_reconfigure"):
            child.get_init_handle()
        return child.get_size()

    assert ranks.play([0, 1, 2], act) == {0: 2, 1: None, 2: 2}


# --- before, between and after epochs -------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_ranks(backend, raised):
    comm = unicomm.new_comm(backend, "cpu", name="alone", enable_reconfigure=True)
    try:
        assert comm.get_backend() == backend
        for act in (
            lambda: comm.barrier(False),
            lambda: comm.all_reduce(torch.ones(1), SUM, True),
            lambda: comm.send(torch.ones(1), 1, False),
            lambda: comm.split([0]),
        ):
            error = raised(act)
            assert type(error) is NotReadyError
            assert "no ranks yet" in error.message
            assert "reconfigure" in error.hint
    finally:
        comm.finalize()
    assert "finalized" in str(raised(comm.barrier, False))
    assert "finalized" in str(raised(comm.reconfigure, 1, []))


@pytest.fixture
def fixed_backend(monkeypatch) -> str:
    """The name of a backend that cannot be reconfigured."""

    class Fixed(Backend):
        name = "fixed"
        capabilities = FakeBackend.capabilities

        @classmethod
        def connect(cls, setup):
            return cls()

        def exchange(self, messages, timeout):
            pass

        def abort(self):
            pass

        close = abort

    monkeypatch.setitem(registry._registered, "fixed", Fixed)
    return "fixed"


def test_a_backend_that_cannot(fixed_backend, raised):
    threads = threading.active_count()
    error = raised(unicomm.new_comm, fixed_backend, "cpu", enable_reconfigure=True)
    assert type(error) is UnsupportedError
    assert "'fixed' cannot change its ranks" in error.message
    assert threading.active_count() == threads
    with unicomm.new_comm(fixed_backend, "cpu") as comm:
        assert "cannot change its ranks" in str(raised(comm.get_init_handle))


def test_not_asked_for(raised):
    with unicomm.new_comm("shm", "cpu") as comm:
        for act in (comm.get_init_handle, lambda: comm.reconfigure(1, [])):
            error = raised(act)
            assert type(error) is UnsupportedError
            assert "'shm' was connected without enable_reconfigure" in error.message
            assert "enable_reconfigure=True" in error.hint


def test_bad_input_changes_nothing(cast, raised):
    ranks, stranger = cast("shm", 2), cast("shm", 1).handles[0]
    other = cast("gloo", 1).handles[0]
    ranks.become([0, 1])
    comm, (own, peer) = ranks.comms[0], ranks.handles
    uid = comm.get_uid()
    bad: dict[str, tuple[Any, ...]] = {
        "was used before": (ranks.uuid, [own, peer]),
        "uuid=True is no whole number": (True, [own]),
        "uuid='7' is no whole number": ("7", [own]),
        "does not hold this rank's own handle": (7, [peer, stranger]),
        "own handle": (7, []),
        "more than once": (7, [own, peer, own]),
        "'garbage' is no init handle": (7, [own, "garbage"]),
        "'unicomm:": (7, [own, peer[:-9]]),
        "None is no init handle": (7, [own, None]),
        "init_handles is a str": (7, own),
        "init_handles[1] is of backend 'gloo', not 'shm'": (7, [own, other]),
        "knows no hint 'slot'": (7, [own, peer], None, {"slot": "1"}),
        "timeout=-1": (7, [own, peer], -1),
    }
    for says, arguments in bad.items():
        error = raised(comm.reconfigure, *arguments)
        assert type(error) is InvalidArgumentError, error
        assert says in error.message
        assert error.op == "reconfigure"
        assert error.hint
    assert comm.get_uid() == uid
    ranks.play([0, 1], lambda comm, _: comm.barrier(False))
    assert ranks.comms[0].barrier(True).seq == 4
    ranks.comms[1].barrier(False)


def test_a_fork_is_no_member(cast):
    """What a forked process inherits neither answers for the communicator nor keeps its port."""
    ranks = cast("gloo", 2)
    ranks.become([0, 1])
    there, here = socket.socketpair()
    child = os.fork()
    if child == 0:
        there.send(b"1")
        there.recv(1)
        os._exit(0)
    try:
        assert here.recv(1) == b"1"
        ranks.become([1, 0])
        address = Handle.read(ranks.handles[0]).at[0]
        ranks.comms[0].finalize()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    finally:
        here.send(b"1")
        os.waitpid(child, 0)


@pytest.mark.parametrize("backend", REAL)
def test_after_an_abort(backend, cast):
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    failures: list[Any] = []
    ranks.comms[1].register_abort_hook(failures.append)

    def act(comm: Communicator, i: int) -> None:
        if i == 0:
            comm.abort()
        else:
            with pytest.raises(AbortedError):
                comm.barrier(False)
        assert comm.is_aborted()

    ranks.play([0, 1, 2], act)
    ranks.become([1, 2, 0])
    assert len(failures) == 1  # and no more by the reconfiguration


@pytest.mark.parametrize("backend", REAL)
def test_after_a_timeout(backend, cast, raised):
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    errors = ranks.play([0, 1], lambda comm, _: raised(comm.barrier, False, timeout=0.5))
    assert {type(error) for error in errors.values()} == {CommTimeoutError}
    ranks.become([1, 0])
    ranks.become([0, 1, 2])  # also the one that was late


@pytest.mark.parametrize("backend", REAL)
def test_after_a_rank_was_lost(backend, cast, raised):
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    ranks.comms[0].finalize()
    errors = ranks.play([1, 2], lambda comm, _: raised(comm.barrier, False))
    assert {type(error) for error in errors.values()} == {PeerLostError}
    ranks.become([1, 2])


@pytest.mark.parametrize("backend", REAL)
def test_pending_works_end(backend, cast):
    ranks = cast(backend, 3)
    ranks.become([0, 1, 2])
    pending = ranks.play(
        [0, 1], lambda comm, _: [comm.all_reduce(torch.ones(9), SUM, True) for _ in range(3)]
    )
    ranks.become([0, 1])
    for works in pending.values():
        for work in works:
            assert type(work.exception()) is AbortedError
    # The rank that was left out hears of it, and ends its part.
    with pytest.raises(AbortedError):
        ranks.comms[2].barrier(False)
    ranks.comms[2].finalize()


def test_an_operation_in_another_thread_ends(cast, raised):
    ranks = cast("shm", 2)
    ranks.become([0, 1])
    errors: list[Any] = []
    entered = threading.Event()
    with ranks.comms[0].register_pre_hook(lambda *_: entered.set()):
        waiter = threading.Thread(target=lambda: errors.append(raised(ranks.comms[0].barrier)))
        waiter.start()
        assert entered.wait(LONG)
    ranks.become([1, 0])
    waiter.join(LONG)
    assert not waiter.is_alive()
    assert type(errors[0]) in (AbortedError, PeerLostError)
