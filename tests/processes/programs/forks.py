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
from unicomm.flight_recorder import writer

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


def main() -> None:
    comm = unicomm.new_comm(BACKEND, torch.device("cpu"), name="main", timeout=20)
    ring = writer.recorder_path()
    before = total(comm)
    if HOW == "multiprocessing":
        loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")
        say("child", outcome=float(sum(batch.sum() for batch in loader)))
    elif (child := os.fork()) == 0:
        if HOW == "use":
            try:
                total(comm)
            except unicomm.CommError as error:
                os.write(1, b"")
                sys.exit(7 if "fork" in str(error) else 8)
        sys.exit(5)
    else:
        _, status = os.waitpid(child, 0)
        say("child", outcome=os.waitstatus_to_exitcode(status))
    say("parent", before=before, after=total(comm), ring=ring is not None and ring.exists())
    comm.finalize()


main()
