"""A timeout in a communicator is told to ranks that wait in its symmetric memory, and the other way round."""

import threading
import time

import pytest
import torch

from unicomm import CommError, CommTimeoutError, symm
from unicomm.testing import run_ranks


@pytest.mark.parametrize("first", ["signal", "barrier"])
def test_all_get_the_cause_of_a_timeout_that_the_first_one_has(first):
    """Rank 0 does not come. One of the others waits for its signal, the other one in a barrier; rank 2 waits
    much longer than rank 1.
    """
    over = threading.Barrier(3)

    def program(comm):
        symm.init(comm)
        pad = symm.empty(1, dtype=torch.int64, comm=comm).zero_()
        comm.barrier(False)
        if comm.get_rank() == 0:
            while over.n_waiting < 2:  # not in a lock, where it would be known to wait for the others
                time.sleep(0.01)
            over.wait(60)
            return ()
        comm.set_timeout(0.5 if comm.get_rank() == 1 else 60)
        signal = (comm.get_rank() == 1) == (first == "signal")
        wait = (lambda: symm.wait_signal(pad[0], 1, 0, comm)) if signal else (lambda: comm.barrier(False))
        with pytest.raises(CommError) as caught:
            wait()
        over.wait(60)
        assert type(caught.value) is CommTimeoutError
        return caught.value.culprits

    _, one, two = run_ranks(program, 3)
    assert one == two
    # Rank 2 is named although it waits for rank 0: these ranks are threads of one process, whose waits do not
    # say to which rank they belong.
    assert one == ((0,) if first == "signal" else (0, 2))
