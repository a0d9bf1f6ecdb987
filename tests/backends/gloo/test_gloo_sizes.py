"""Messages of one size that the other end expects in another: Gloo alone ends the process then."""

from __future__ import annotations

import pytest
import torch

import unicomm
from unicomm import CommTimeoutError, Communicator, MismatchError
from unicomm.c10d.process_group import UnicommProcessGroup
from unicomm.testing import run_ranks

LONG = 1000.0  # seconds; who waits for that fails by pytest's own timeout


@pytest.mark.parametrize("how", ["send and recv", "batch", "asynchronous"])
def test_both_ends_are_told(raised, how):
    """Also when the receiver comes late, and the third rank hears of it."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        comm.barrier(False)
        x = torch.ones(4 if me == 0 else 6)

        def act():
            if how == "batch":
                batch = comm.batch_op_create()
                (batch.send(x, 2) if me == 0 else batch.recv(x, 0)).issue(False)
            elif how == "asynchronous":
                (comm.send(x, 2, True) if me == 0 else comm.recv(x, 0, True)).wait()
            else:
                (comm.send if me == 0 else comm.recv)(x, 2 if me == 0 else 0, False)

        error = raised(act) if me != 1 else raised(comm.barrier, False)
        assert type(error) is MismatchError
        assert error.culprits == (0, 2)
        assert "rank 2 expects 24 bytes from rank 0, which sends 16" in error.message
        assert torch.all(x == 1)  # nothing was written

    run_ranks(program, 3, backend="gloo", timeout=LONG)


def test_what_fits_is_compared_too():
    """A message that waits for long because its peer is late."""

    def program(comm: Communicator) -> None:
        me, x = comm.get_rank(), torch.ones(4)
        for turn in range(3):
            if me == turn % 2:
                comm.send(x, 1 - me, False)
            else:
                comm.recv(x, 1 - me, False)

    from unicomm.backends.gloo import backend as gloo

    was, gloo.COMPARE = gloo.COMPARE, 0.0
    try:
        run_ranks(program, 2, backend="gloo", timeout=LONG)
    finally:
        gloo.COMPARE = was


def test_side_by_side_the_process_lives(raised):
    """Messages of a process group wait until the deadline, when the ends may ask each other."""

    def program(comm: Communicator) -> None:
        me = comm.get_rank()
        x = torch.ones(4 if me == 0 else 6)
        comm.set_timeout(1.0)
        group = UnicommProcessGroup(comm)
        work = group.send([x], 1, 0) if me == 0 else group.recv([x], 0, 0)
        error = raised(work.wait)
        assert isinstance(error, (MismatchError, CommTimeoutError, unicomm.PeerLostError))
        assert torch.all(x == 1)

    run_ranks(program, 2, backend="gloo", timeout=LONG)
