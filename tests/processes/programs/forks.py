"""Ranks that fork in the middle of their work: forks.py HOW BACKEND

exit            children that end like any program, with exit handlers and all
multiprocessing a DataLoader with two worker processes
use             a child that uses its parent's communicator
"""

import os
import sys

import torch
from common import say

import unicomm
from unicomm.flight_recorder.recording import writer

HOW, BACKEND = sys.argv[1:]


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i))


def total(comm: unicomm.Communicator) -> float:
    x = torch.ones(10)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, True).wait()
    return float(x.sum())


def refusals(comm: unicomm.Communicator, pending: unicomm.Work | None) -> int:
    """How many uses of the parent's communicator are refused in a child; ending it there reaches nobody."""
    x = torch.ones(3)
    uses = [
        lambda: comm.barrier(False),
        lambda: comm.all_reduce(x, unicomm.ReduceOp.SUM, False),
        lambda: comm.send(x, 1 - comm.get_rank(), True),
        *([pending.wait] if pending else []),
    ]
    refused = 0
    for use in uses:
        try:
            use()
        except unicomm.NotReadyError as error:
            refused += "forked from" in str(error)
    comm.abort()
    comm.finalize()
    return refused


def main() -> None:
    comm = unicomm.new_comm(BACKEND, torch.device("cpu"), name="main", timeout=20)
    ring = writer.recorder_path()
    before = total(comm)
    message = torch.full((1000,), float(comm.get_rank()))
    # On rank 0 an operation is under way while it forks.
    pending = comm.recv(message, 1, True) if comm.get_rank() == 0 else None
    if HOW == "multiprocessing":
        loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")
        say("child", outcome=float(sum(batch.sum() for batch in loader)))
    elif (child := os.fork()) == 0:
        sys.exit(refusals(comm, pending) if HOW == "use" else 5)
    else:
        _, status = os.waitpid(child, 0)
        say("child", outcome=os.waitstatus_to_exitcode(status))
    if pending is not None:
        pending.wait()
    else:
        comm.send(message, 0, False)
    with unicomm.new_comm(BACKEND, torch.device("cpu"), name="later", timeout=20) as later:
        total(later)  # the store still works
    say(
        "parent",
        before=before,
        after=total(comm),
        received=float(message[0]),
        ring=ring is not None and ring.exists(),
    )
    comm.finalize()


main()
