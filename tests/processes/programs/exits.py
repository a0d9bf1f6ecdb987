"""Ranks that end without finalize: exits.py SCENARIO [BACKEND]

forgets     all of them, after some operations
early       rank 1, while the others go on
vanishes    rank 1, by os._exit
raises      all of them, by an unhandled exception
catches     all of them handle an exception and end well
pending     rank 0 with an operation under way that nobody joins
buffered    rank 0 right after an asynchronous send
clean       all of them finalize
"""

import os
import sys

import torch

import unicomm
from tests.processes.programs.common import hear, reporting, say

SCENARIO = sys.argv[1]
TIMEOUT = 60.0


def main() -> None:
    comm = unicomm.new_comm((sys.argv[2:] or ["shm"])[0], torch.device("cpu"), name="main", timeout=TIMEOUT)
    rank = comm.get_rank()
    x = torch.ones(1000)
    comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    say("ready")
    if SCENARIO == "clean":
        comm.finalize()
    elif SCENARIO in ("early", "vanishes"):
        hear()
        if rank != 1:
            with reporting():
                comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        elif SCENARIO == "vanishes":
            os._exit(3)
    elif SCENARIO == "raises":
        raise ValueError("a mistake of the program")
    elif SCENARIO == "catches":
        try:
            comm.all_reduce("no tensor", unicomm.ReduceOp.SUM, False)
        except unicomm.InvalidArgumentError:
            say("caught")
    elif SCENARIO == "pending":
        if rank == 0:
            comm.all_reduce(x, unicomm.ReduceOp.SUM, True)
        else:
            hear()
    elif SCENARIO == "buffered":
        if rank == 0:
            comm.send(torch.arange(5000.0), 1, True)
        else:
            hear()
            got = torch.zeros(5000)
            comm.recv(got, 0, False)
            say("received", right=bool((got == torch.arange(5000.0)).all()))


main()
