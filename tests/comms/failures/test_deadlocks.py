"""Ranks that wait for each other: said as soon as they all do, not at the timeout; and who is to blame."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests import ROOT
from tests.wait_tables import Looks
from unicomm import CommTimeoutError, Communicator, DeadlockError, ReduceOp, new_comm
from unicomm.flight_recorder.recording.thread_frames import frames_of_threads
from unicomm.testing import run_ranks

LARGE = 400_000  # elements of a message that does not fit into the transport's own memory
FOR_EVER = 1000.0  # seconds, beyond the test's own limit


def circle(comm: Communicator, me: int) -> None:
    comm.send(torch.ones(LARGE), (me + 1) % comm.get_size(), False, timeout=FOR_EVER)


def receive_first(comm: Communicator, me: int) -> None:
    comm.recv(torch.ones(1), (me + 1) % comm.get_size(), False, timeout=FOR_EVER)


def message_and_collective(comm: Communicator, me: int) -> None:
    if me == 1:
        comm.recv(torch.ones(1), 0, False, timeout=FOR_EVER)
    else:
        comm.all_reduce(torch.ones(9), ReduceOp.SUM, False, timeout=FOR_EVER)


def in_the_background(comm: Communicator, me: int) -> None:
    comm.recv(torch.ones(1), 1 - me if me < 2 else 0, True, timeout=FOR_EVER).wait()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("program", [circle, receive_first, message_and_collective, in_the_background])
def test_a_deadlock_is_said_at_once(program, ranks, raised):
    def rank(comm: Communicator) -> str:
        error = raised(program, comm, comm.get_rank())
        assert type(error) is DeadlockError, repr(error)
        assert isinstance(error, CommTimeoutError)  # handlers of timeouts catch deadlocks, too
        assert comm.is_aborted()
        return error.message

    said = run_ranks(rank, ranks, timeout=50)
    assert all("wait for each other" in message for message in said)
    named = [message for message in said if "these ranks" in message]
    assert named
    if program is circle:
        for r in range(ranks):
            assert f"rank {r} in send #1 to rank {(r + 1) % ranks} ({__file__}:" in named[0]


@pytest.mark.timeout(60)
def test_ranks_that_are_only_late_are_no_deadlock():
    """Everyone waits but one, until all have looked for a deadlock several times."""

    def rank(comm: Communicator) -> None:
        me, n = comm.get_rank(), comm.get_size()
        if me == n - 1:
            Looks(n - 1).wait(over=comm.is_aborted)
            comm.send(torch.ones(1), 0, False)
        elif me == 0:
            comm.recv(torch.ones(1), n - 1, False)
            comm.send(torch.ones(1), 1, False)
        else:
            comm.recv(torch.ones(1), me - 1, False)
            if me + 1 < n - 1:
                comm.send(torch.ones(1), me + 1, False)
        comm.barrier(False)

    run_ranks(rank, 4, timeout=50)


@pytest.mark.timeout(60)
def test_messages_of_which_a_later_one_helps_are_no_deadlock():
    """Both ranks wait for a message, and both send it later, while they do."""

    from unicomm.c10d.process_group import UnicommProcessGroup

    def rank(comm: Communicator) -> None:
        group = UnicommProcessGroup(comm)
        other, got = 1 - comm.get_rank(), torch.zeros(3)
        receiving = group.recv([got], other, 0)
        Looks(2).wait(over=receiving.is_completed)  # then the other rank has waited for enough looks
        sending = group.send([torch.ones(3)], other, 0)
        receiving.wait()
        sending.wait()
        assert got.tolist() == [1, 1, 1]

    run_ranks(rank, 2, timeout=50)


@pytest.mark.timeout(60)
def test_who_waits_for_the_missing_rank_is_not_to_blame(raised):
    """Rank 3 is away, rank 2 waits for it, rank 1 for rank 2, rank 0 for all: all name rank 3."""
    over = threading.Event()
    gone: list[int] = []

    def rank(comm: Communicator) -> None:
        me = comm.get_rank()
        if me == 3:
            Looks(3).wait(over=over.is_set)
            assert over.wait(50)
            return
        limit = 15.0 if me == 0 else FOR_EVER
        if me == 0:
            error = raised(comm.all_reduce, torch.ones(9), ReduceOp.SUM, False, timeout=limit)
        else:
            error = raised(comm.recv, torch.ones(1), me + 1, False, timeout=limit)
        assert type(error) is CommTimeoutError
        assert error.culprits == (3,), error
        gone.append(me)
        if len(gone) == 3:
            over.set()

    run_ranks(rank, 4, timeout=50)


def places() -> dict[str, list[str]]:
    """Where the threads of this process are: one that an earlier test has left hides a deadlock."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident)} ({ident})": [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack(frame)]
        for ident, frame in frames_of_threads().items()
    }


@contextlib.contextmanager
def signal_after_looks(waits: int, act: Callable[[], None]) -> Iterator[None]:
    """Has the main thread call `act` in a signal handler when `waits` ranks have looked often enough.

    Another process watches the looks: a thread here would be one that may end the deadlock.
    """
    code = (
        "import os, signal; from tests.wait_tables import Looks\n"
        f"Looks({waits}, [{os.getpid()}]).wait(); os.kill({os.getpid()}, signal.SIGUSR1)"
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: act())
    watcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("harmless", [True, False])
def test_threads_that_threading_does_not_know(harmless, raised):
    """execnet's reader is such a one; one of the user's may come, and then nothing is said."""
    source = "def wait(lock):\n    with lock:\n        pass\n"
    space: dict[str, Any] = {}
    name = "/execnet/gateway_base.py" if harmless else "program.py"
    exec(compile(source, name, "exec"), space)
    before = threading.Lock()
    before.acquire()
    _thread.start_new_thread(space["wait"], (before,))

    def rank(comm: Communicator) -> tuple[bool, str, object]:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        mine = comm if me == 0 else spare[me]
        error = raised(mine.recv, torch.ones(1), other, False, timeout=25.0 if harmless else FOR_EVER)
        comm.abort()
        return isinstance(error, CommTimeoutError), error.message, places()

    spare: dict[int, Communicator] = {}
    watched: list[Communicator] = []

    def both(comm: Communicator) -> tuple[bool, str, object]:
        with comm.split([0, 1], "other") as spare[comm.get_rank()]:
            watched.extend((comm, spare[comm.get_rank()]))
            result = rank(comm)
            spare[comm.get_rank()].abort()
            return result

    def end() -> None:
        for comm in watched:
            comm.abort()

    try:
        with contextlib.nullcontext() if harmless else signal_after_looks(2, end):
            said = run_ranks(both, 2, timeout=50)
    finally:
        before.release()
    assert any("these ranks wait for each other" in text for _, text, _ in said) == harmless, said


@pytest.mark.timeout(60)
def test_idle_gloo_communicators_hide_no_deadlock(raised):
    """Their thread waits for sockets; it calls nothing by itself."""
    store = HashStore()

    def rank(comm: Communicator) -> str:
        me, other = comm.get_rank(), 1 - comm.get_rank()
        idle = new_comm("gloo", "cpu", name="idle", store=store, rank=me, size=2)
        with idle, comm.split([0, 1], "other") as second:
            idle.barrier(False)
            error = raised((second if me else comm).recv, torch.ones(1), other, False, timeout=FOR_EVER)
            comm.abort()
            second.abort()
            return str(error)

    said = run_ranks(rank, 2, timeout=50)
    assert any("these ranks wait for each other" in text for text in said), said
