"""What ranks that wait in the communicator itself learn of a timeout on symmetric memory."""

import threading
import time

import pytest
import torch

from unicomm import CommError, CommTimeoutError, symm
from unicomm.testing import run_ranks


def test_who_waits_in_a_barrier_gets_the_cause_of_a_timeout_on_symmetric_memory():
    """Rank 0 does not come. Rank 1 waits for its signal, and rank 2 in a barrier, for much longer."""
    over = threading.Barrier(3)

    def program(comm):
        symm.init(comm)
        pad = symm.empty(1, dtype=torch.int64, comm=comm).zero_()
        comm.barrier(False)
        if comm.get_rank() == 0:
            while over.n_waiting < 2:  # not in a lock, where it would be known to wait for the others
                time.sleep(0.01)
            over.wait(60)
            return
        comm.set_timeout(0.5 if comm.get_rank() == 1 else 60)
        wait = (
            (lambda: symm.wait_signal(pad[0], 1, 0, comm))
            if comm.get_rank() == 1
            else lambda: comm.barrier(False)
        )
        with pytest.raises(CommError) as caught:
            wait()
        over.wait(60)
        assert type(caught.value) is CommTimeoutError
        assert caught.value.culprits == (0,)

    run_ranks(program, 3)
