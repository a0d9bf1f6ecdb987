"""Ranks that wait for each other on symmetric memory: said as soon as they all do, and only then.

tests/processes/test_symmetric_memory.py has circles through the communicator as well.
"""

import os
import threading

import pytest
import torch

from tests.symm.exchanges import shared
from tests.wait_tables import Looks, looks
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
def test_a_signal_that_anybody_may_send_is_no_deadlock():
    """Two name each other, but the third one signals both. Their waits stay in the wait table for a while
    without being taken for a circle.
    """
    late = threading.Event()

    def rank(comm):
        symm.init(comm)
        me = comm.get_rank()
        pad = shared(comm, torch.zeros(1, dtype=torch.int64))
        x = shared(comm, torch.zeros(1))
        if me < 2:
            symm.wait_signal(pad[0], 7, 1 - me, comm)
        else:
            late.wait(1.5)
            assert looks(os.getpid())
            Looks(2).wait(over=comm.is_aborted)
            for peer in (0, 1):
                symm.put_signal(x, pad[0], 7, peer, comm)
        comm.barrier()

    run_ranks(rank, 3, timeout=50)


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
