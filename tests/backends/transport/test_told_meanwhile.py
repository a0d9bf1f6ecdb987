"""A fault that a rank is just being told counts, although its connection has nothing unread any more."""

import threading
import time

from unicomm import AbortedError, Communicator, WorkStatus
from unicomm.backends.out_of_band.fault_channel import FaultChannel
from unicomm.comms.failures.faults import Fault
from unicomm.testing import run_ranks


def test_a_fault_that_is_being_read(backend, monkeypatch, raised):
    """Rank 1 calls the barrier when it has rank 0's data, and is just reading that rank 0 has aborted."""
    reading, go_on = threading.Event(), threading.Event()
    hear = FaultChannel._hear

    def slow(channel, peer, message):
        if isinstance(message, Fault):
            reading.set()
            assert go_on.wait(60)
        hear(channel, peer, message)

    monkeypatch.setattr(FaultChannel, "_hear", slow)

    def program(comm: Communicator) -> None:
        if comm.get_rank() == 0:
            work = comm.barrier(True)
            while work.status is not WorkStatus.INPROGRESS:
                time.sleep(0.001)
            time.sleep(0.2)  # its slot is on the way
            comm.abort()
            assert type(raised(work.wait, 30)) is AbortedError
        else:
            assert reading.wait(60)
            threading.Timer(0.3, go_on.set).start()
            error = raised(comm.barrier, False)
            assert (type(error), error.culprits) == (AbortedError, (0,))

    run_ranks(program, 2, backend=backend, timeout=60)
