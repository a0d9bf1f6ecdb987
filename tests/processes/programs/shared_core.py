"""Two ranks that move to one core, with a communicator from before the move, and one from after it."""

import os
import time

import torch

import unicomm
from tests.processes.programs.common import say

BLOCKS, CALLS = 40, 100

before = unicomm.new_comm("shm", torch.device("cpu"), name="before")
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
since = unicomm.new_comm("shm", torch.device("cpu"), name="since")
x = torch.zeros(2)
least = {}
for _ in range(BLOCKS):
    for comm in before, since:
        comm.barrier(False)
        began = time.perf_counter()
        for _ in range(CALLS):
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        seconds = time.perf_counter() - began
        least[comm] = min(seconds, least.get(comm, seconds))
say("measured", before=least[before], since=least[since])
before.finalize()
since.finalize()
