"""Ranks that wait for each other on symmetric memory: said as soon as they all do, and only then.

tests/processes/test_symmetric_memory.py has circles through the communicator as well.
"""

import threading

import pytest
import torch

from tests.symm.exchanges import shared
from tests.wait_tables import Looks
from unicomm import DeadlockError, symm
from unicomm.testing import run_ranks

FOR_EVER = 100.0  # seconds, beyond the test's own limit


def signals(comm, window, me):
    """A circle of all ranks."""
    window.wait_signal((me + 1) % comm.get_size(), timeout=FOR_EVER)


def fast_signals(comm, window, me):
    """With the communicator's own timeout, in one native call."""
    window.wait_signal((me + 1) % comm.get_size())


def signal_and_barrier(comm, window, me):
    if me == 1:
        window.wait_signal(0, timeout=FOR_EVER)
    else:
        window.barrier(timeout=FOR_EVER)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("program", [signals, fast_signals, signal_and_barrier])
def test_a_deadlock_is_said_at_once(program, n):
    def rank(comm):
        symm.init(comm)
        window = comm.new_window()
        comm.barrier()
        with pytest.raises(DeadlockError) as error:
            program(comm, window, comm.get_rank())
        return error.value.message

    said = run_ranks(rank, n, timeout=50)
    assert any("wait for each other forever" in message for message in said), said


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "writer", ["its own thread", "the other's thread", "a team's thread", "a third rank"]
)
def test_a_word_that_anybody_may_write_is_no_deadlock(writer):
    """Rank 0 waits for a word, the others for rank 0, and a thread that nobody waits for writes the word.

    It may do so by a plain store, or through a team, of which the communicator knows nothing.
    """
    n = 3 if writer == "a third rank" else 2

    def rank(comm):
        symm.init(comm)
        me, window = comm.get_rank(), comm.new_window()
        pad, x = shared(comm, torch.zeros(1, dtype=torch.int64)), shared(comm, torch.zeros(1))
        handle = symm.rendezvous(pad, comm)
        team = comm.split([0, 1], "team") if writer == "a team's thread" else None
        if team is not None:
            symm.init_team(team, comm)

        def write():
            Looks(2).wait(over=comm.is_aborted)
            if team is not None:
                symm.put_signal(x, pad[0], 7, 0, team)
            elif writer == "a third rank":
                symm.put_signal(x, pad[0], 7, 0, comm)
            elif writer == "its own thread":
                pad.fill_(7)
            else:
                handle.get_buffer(0, (1,), torch.int64).fill_(7)

        late = threading.Thread(target=write)
        if me == (0 if writer == "its own thread" else n - 1):
            late.start()
            if writer == "a third rank":
                late.join()
        if me == 0:
            symm.wait_signal(pad[0], 7, 1, comm)
        window.barrier(timeout=FOR_EVER)
        if late.ident is not None:
            late.join()
        comm.barrier()
        if team is not None:
            team.finalize()

    run_ranks(rank, n, timeout=50)


@pytest.mark.timeout(60)
def test_a_rank_that_is_only_late_is_no_deadlock():
    def rank(comm):
        symm.init(comm)
        window = comm.new_window()
        me, n = comm.get_rank(), comm.get_size()
        if me:
            window.wait_signal(me - 1, False)
        else:
            Looks(2).wait(over=comm.is_aborted)
        window.signal((me + 1) % n, False)
        if not me:
            window.wait_signal(n - 1, False)
        comm.barrier()

    run_ranks(rank, 3, timeout=50)
