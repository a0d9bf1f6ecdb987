"""What a rank costs while it waits for a late one."""

import threading
import time

import pytest
import torch

from unicomm.testing import run_ranks

LATE = 0.5  # seconds


@pytest.mark.parametrize("what", ["barrier", "recv"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_no_core_is_burnt(ranks, what):
    """By the clock that runs only while the thread has a core, so that a busy machine changes nothing."""

    def program(comm):
        comm.barrier(False)
        if comm.get_rank() == ranks - 1:
            threading.Event().wait(LATE)
        before = time.thread_time()
        if what == "barrier":
            comm.barrier(False)
        elif comm.get_rank() == ranks - 1:
            for other in range(ranks - 1):
                comm.send(torch.ones(3), other, False)
        else:
            comm.recv(torch.ones(3), ranks - 1, False)
        return time.thread_time() - before

    used = run_ranks(program, ranks)
    assert all(seconds < LATE / 5 for seconds in used), used
