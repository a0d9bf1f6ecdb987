"""Ranks with a fault in the program: injected.py FAULT VICTIM [TIMEOUT]. The test looks at their rings.

If a rank is to give up, only the last one has a short timeout, and the test has it call when the others wait:
on a busy machine a rank may come later than any timeout, and would be missing, too. With the fault "never",
TIMEOUT is that timeout.
"""

import contextlib
import sys

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say

FAULT, VICTIM = sys.argv[1], int(sys.argv[2])
TIMEOUT = float(sys.argv[3]) if len(sys.argv) > 3 else None
SUM = unicomm.ReduceOp.SUM

comm = unicomm.new_comm("shm", torch.device("cpu"), name="main", timeout=60)
rank, size = comm.get_rank(), comm.get_size()
guilty = rank == VICTIM
gives_up = TIMEOUT is not None and rank == max({*range(size)} - {VICTIM})
pair = comm.split([0, 1], "pair") if rank < 2 else None


def never() -> None:
    if guilty or gives_up:
        hear()  # outside of the communicator
    comm.all_reduce(torch.ones(8), SUM, False, timeout=TIMEOUT if gives_up else None)  # the others wait here


def operation() -> None:
    if guilty:
        comm.barrier(False)  # the wrong line
    else:
        comm.all_reduce(torch.ones(8), SUM, False)


def elements() -> None:
    comm.all_reduce(torch.ones(9 if guilty else 8), SUM, False)


def dtype() -> None:
    comm.all_reduce(torch.ones(8, dtype=torch.float64 if guilty else torch.float32), SUM, False)


def root() -> None:
    comm.broadcast(torch.ones(8), 1 if guilty else 0, False)


def reduction() -> None:
    comm.all_reduce(torch.ones(8), unicomm.ReduceOp.MAX if guilty else SUM, False)


def cycle() -> None:
    """Ranks 0 and 1 enter the two communicators in opposite order."""
    if rank == 0:
        comm.all_reduce(torch.ones(8), SUM, False)
    elif rank == 1:
        pair.all_reduce(torch.ones(8), SUM, False)
    if rank == 0:
        pair.all_reduce(torch.ones(8), SUM, False)
    else:
        comm.all_reduce(torch.ones(8), SUM, False)


def lone() -> None:
    """The victim receives what nobody sends; the others go on."""
    if guilty:
        comm.recv(torch.ones(8), (VICTIM + 1) % size, False)
    comm.all_reduce(torch.ones(8), SUM, False)


def crossed() -> None:
    """The pair's first rank never receives what the other one waits for to be sent: both receive."""
    if rank < 2:
        comm.recv(torch.ones(8), 1 - rank, False)
    comm.all_reduce(torch.ones(8), SUM, False)


def queued() -> None:
    """All ranks issue all operations, but ranks 0 and 1 a message and a collective in opposite order."""
    works = []
    if rank == 0:
        works.append(comm.recv(torch.ones(8), 1, async_op=True))
    works.append(comm.all_reduce(torch.ones(8), SUM, async_op=True))
    if rank == 1:
        works.append(comm.send(torch.ones(8), 0, async_op=True))
    for work in works:
        work.wait()


def caught() -> None:
    """The others catch the timeout of a collective that rank 0 does not call; later the victim skips one."""
    other = unicomm.new_comm("shm", torch.device("cpu"), name="other", timeout=60)
    say("created")
    if rank:
        last = rank == size - 1
        if last:
            hear()
        with contextlib.suppress(unicomm.CommError):
            comm.all_reduce(torch.ones(8), SUM, timeout=0.5 if last else None)
        say("caught")
    else:
        hear()  # in no operation: else all would wait for each other
    other.barrier()
    say("together")
    if not guilty:
        other.all_reduce(torch.ones(8), SUM)


def nothing() -> None:
    comm.all_reduce(torch.ones(8), SUM, False)


for _ in range(10):
    comm.all_reduce(torch.ones(8), SUM, False)
    comm.broadcast(torch.ones(8), 0, False)
say("ready", line=never.__code__.co_firstlineno + 3)
hear()
say("calling")
with reporting():
    globals()[FAULT]()
hear()
