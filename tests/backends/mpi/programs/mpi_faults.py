"""What goes wrong, on 4 ranks: each error, and that the job goes on."""

import contextlib
import signal
import threading
import time

import torch

import unicomm
from tests.backends.mpi.programs.mpi_common import comm as control
from tests.backends.mpi.programs.mpi_common import describe, me, raised, say, size
from unicomm.backends.bootstrap import mpi_library
from unicomm.backends.mpi import operations as mpi
from unicomm.c10d.process_group import UnicommProcessGroup

SUM = unicomm.ReduceOp.SUM


def new_comm(name: str) -> unicomm.Communicator:
    return control.split(list(range(size)), name)


def names_who_did_not_come() -> None:
    with new_comm("late") as comm:
        x = torch.full((5,), 1.0)
        if me != 2:
            error = raised(lambda: comm.all_reduce(x, SUM, False, timeout=3))
            assert isinstance(error, unicomm.CommTimeoutError), error
            assert error.culprits == (2,), error
        control.barrier(False)
        error = raised(lambda: comm.all_reduce(x, SUM, False))
        assert isinstance(error, unicomm.CommTimeoutError), error
        assert error.culprits == (2,), error
        assert x.tolist() == [1.0] * 5
        say("timeout", me, **describe(error))


def names_whose_message_did_not_come() -> None:
    with new_comm("message") as comm:
        if me == 0:
            error = raised(lambda: comm.recv(torch.zeros(5), 1, False, timeout=1))
            assert isinstance(error, unicomm.CommTimeoutError), error
            assert error.culprits == (1,), error
        control.barrier(False)


def names_a_rank_that_finalizes_while_its_message_is_waited_for() -> None:
    comm = new_comm("leaves")
    if me == 0:
        waiting = comm.recv(torch.zeros(5), 1, True)
        time.sleep(0.5)  # for the message to be under way; else this is found when it begins
        control.barrier(False)
        began = time.monotonic()
        error = raised(waiting.wait)
        assert time.monotonic() - began < 30  # the deadline would be 60
        assert isinstance(error, unicomm.PeerLostError), error
        assert error.culprits == (1,), error
        assert error.message == "rank 1 has finalized this communicator", error
    else:
        control.barrier(False)
    comm.finalize()


def aborts_at_once() -> None:
    """Rank 0 waits for a message and another thread of it aborts; the others hear of it."""
    with new_comm("abort") as comm:
        if me == 0:
            waiting = comm.recv(torch.zeros(5), 1, True)
            comm.abort()
            error = raised(waiting.wait)
            assert comm.is_aborted()
        else:
            error = raised(lambda: comm.barrier(False))
            assert error.culprits == (0,), error
        assert isinstance(error, unicomm.AbortedError), error
        control.barrier(False)


def tells_wrong_sizes_of_messages() -> None:
    for sent, expected in ((8, 4), (4, 8)):
        with new_comm(f"size {sent}") as comm:
            if me == 0:
                comm.send(torch.ones(sent), 1, False)
                control.barrier(False)
            elif me == 1:
                x = torch.zeros(expected)
                error = raised(lambda x=x, comm=comm: comm.recv(x, 0, False))
                assert isinstance(error, unicomm.BackendError), error
                control.barrier(False)
            else:
                control.barrier(False)


def tells_a_short_message_for_a_large_receive() -> None:
    """Of more bytes than MPI counts, taken from 1000 bytes on."""
    most, mpi._MOST = mpi._MOST, 1000
    try:
        with new_comm("short") as comm:
            if me == 0:
                comm.send(torch.ones(10), 1, False)
            elif me == 1:
                error = raised(lambda: comm.recv(torch.zeros(1000), 0, False))
                assert isinstance(error, unicomm.BackendError), error
            control.barrier(False)
    finally:
        mpi._MOST = most


def keeps_what_an_interrupted_wait_has_posted() -> None:
    """MPI may still write into a receive that its rank has left by an exception of a signal handler."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with new_comm("interrupted") as comm:
        if me == 0:
            before = signal.signal(signal.SIGALRM, interrupt)
            kept = len(mpi_library._abandoned)
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with contextlib.suppress(KeyboardInterrupt):
                comm.all_reduce(torch.ones(5), SUM, False)
                raise AssertionError("it was not interrupted")
            signal.signal(signal.SIGALRM, before)
            assert len(mpi_library._abandoned) > kept
            assert comm.is_aborted()
        control.barrier(False)


def refuses_tags_that_the_library_does_not_have() -> None:
    """The message is refused before it is begun, so other messages under way are not affected."""
    with new_comm("tags") as comm:
        most = comm.get_capabilities().most_tag
        assert most <= int(mpi_library.load().COMM_WORLD.Get_attr(mpi_library.load().TAG_UB))
        if me < 2:
            got, group = torch.zeros(3), UnicommProcessGroup(comm)
            work = group.recv([got], 1 - me, 0)
            error = raised(lambda: group.send([torch.ones(3)], 1 - me, most + 1))
            assert isinstance(error, unicomm.InvalidArgumentError), error
            group.send([torch.full((3,), float(me))], 1 - me, 0).wait()
            work.wait()
            assert got.tolist() == [1.0 - me] * 3
        control.barrier(False)


def goes_on_with_a_new_one() -> None:
    for _ in range(3):
        with new_comm("again") as comm:
            x = torch.ones(70_000)
            comm.all_reduce(x, SUM, False)
            assert bool((x == size).all())


def leaves_a_timeout_in_another_thread_alone() -> None:
    """Two communicators of one process: one breaks, the other goes on meanwhile."""
    with new_comm("breaks") as breaks, new_comm("goes on") as goes_on:
        errors: list[unicomm.CommError] = []
        if me == 0:
            thread = threading.Thread(
                target=lambda: errors.append(
                    raised(lambda: breaks.recv(torch.zeros(1), 1, False, timeout=0.5))
                )
            )
            thread.start()
        for _ in range(50):
            goes_on.barrier(False)
        if me == 0:
            thread.join()
            assert isinstance(errors[0], unicomm.CommTimeoutError)
        goes_on.barrier(False)


CASES = [
    names_who_did_not_come,
    names_whose_message_did_not_come,
    names_a_rank_that_finalizes_while_its_message_is_waited_for,
    aborts_at_once,
    tells_wrong_sizes_of_messages,
    tells_a_short_message_for_a_large_receive,
    refuses_tags_that_the_library_does_not_have,
    goes_on_with_a_new_one,
    leaves_a_timeout_in_another_thread_alone,
    keeps_what_an_interrupted_wait_has_posted,
]
