"""Ranks of which one is killed or stopped: faults.py MOMENT VICTIM SIGNAL TIMEOUT [BACKEND]

MOMENT says what they do just then. The victim either waits for its fate outside the communicator, or sends
itself the signal from a second thread, when it sees in its tensor that a transfer is under way.
"""

import os
import signal
import sys
import threading

import torch

import unicomm
from tests.processes.programs.common import describe, hear, holdings, reporting, say, settled

MOMENT, VICTIM, SIGNAL = sys.argv[1], int(sys.argv[2]), signal.Signals[sys.argv[3]]
LARGE = 64 << 20  # elements: 256 MiB


def when_under_way(tensor: torch.Tensor) -> threading.Thread:
    """Strikes this process as soon as the first element of `tensor` changes."""
    view, before = tensor.numpy(), float(tensor[0])

    def watch() -> None:
        while view[0] == before:
            pass
        say("struck")
        os.kill(os.getpid(), SIGNAL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def idle_or(comm: unicomm.Communicator, act: object) -> None:
    """The victim waits for its fate, and goes on if it survives; the others `act` when they are told."""
    hear()
    say("calling")
    with reporting():
        act()


def collective(comm: unicomm.Communicator) -> None:
    x = torch.ones(1000)
    idle_or(comm, lambda: comm.all_reduce(x, unicomm.ReduceOp.SUM, False))


def p2p(comm: unicomm.Communicator) -> None:
    """The victim's neighbours wait to receive, to send more than fits into the ring, and for both."""
    small, large = torch.ones(1000), torch.ones(4 << 20)
    before, after = (VICTIM - 1) % comm.get_size(), (VICTIM + 1) % comm.get_size()

    def act() -> None:
        if comm.get_rank() in (before, VICTIM):
            comm.recv(small, VICTIM if comm.get_rank() == before else before, False)
        elif comm.get_rank() == after:
            comm.send(large, VICTIM, False)
        else:
            batch = comm.batch_op_create()
            batch.recv(small, VICTIM)
            batch.send(large, VICTIM)
            batch.issue(False)

    idle_or(comm, act)


def asynchronous(comm: unicomm.Communicator) -> None:
    """Three operations are queued; all of them end with the error, and so does a later one."""
    hear()
    works = [comm.all_reduce(torch.ones(1000), unicomm.ReduceOp.SUM, True) for _ in range(3)]
    say("calling")
    errors = []
    for work in works:
        try:
            work.wait()
        except unicomm.CommError as error:
            errors.append(describe(error))
    try:
        comm.barrier(False)
    except unicomm.CommError as error:
        errors.append(describe(error))
    say("error", **errors[0], all=[error["type"] for error in errors])


def transfer(comm: unicomm.Communicator) -> None:
    """In the middle of a large all-reduce: the tensor's end must be as it was when the others fail."""
    interrupted(comm, LARGE)


def encoded(comm: unicomm.Communicator) -> None:
    """The same, when the first of many chunks in a wire format have come back."""
    interrupted(comm, LARGE // 4, {"wire": "mxfp8"})


def interrupted(comm: unicomm.Communicator, count: int, hints: dict[str, str] | None = None) -> None:
    x = torch.full((count,), 2.0)
    comm.barrier(False, timeout=60)  # making it takes a while, and the time that is tested begins afterwards
    thread = when_under_way(x) if comm.get_rank() == VICTIM else None
    with reporting():
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False, hints)  # the line that the recorder has to show
    if thread is not None:
        thread.join()
    say("tensor", first=float(x[0]), last=float(x[-1]))


def main() -> None:
    before = holdings()
    backend = (sys.argv[5:] or ["shm"])[0]
    comm = unicomm.new_comm(backend, torch.device("cpu"), name="main", timeout=60)
    comm.set_timeout(float(sys.argv[4]))
    comm.all_reduce(torch.ones(10), unicomm.ReduceOp.SUM, False)
    say("ready", **holdings())
    moments = (collective, p2p, asynchronous, transfer, encoded)
    {moment.__name__: moment for moment in moments}[MOMENT](comm)
    comm.finalize()
    say("finalized", before=before, after=settled(before))


main()
