"""Four ranks on two cores, two on each. Counts the context switches of a rank per collective."""

import os
from resource import RUSAGE_THREAD, getrusage

import torch

import unicomm
from tests.processes.programs.common import say

BLOCKS, CALLS = 60, 200

cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
comm = unicomm.new_comm("shm", torch.device("cpu"), name="crowded")
os.sched_setaffinity(0, [cores[comm.get_rank() % 2]])
x = torch.zeros(2)
least = float("inf")
for _ in range(BLOCKS):
    comm.barrier(False)
    before = getrusage(RUSAGE_THREAD)
    for _ in range(CALLS):
        comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
    after = getrusage(RUSAGE_THREAD)
    switches = after.ru_nivcsw + after.ru_nvcsw - before.ru_nivcsw - before.ru_nvcsw
    least = min(least, switches / CALLS)
say("measured", switches=least)
comm.finalize()
