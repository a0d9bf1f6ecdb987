"""Two ranks that exchange messages in a communicator of more ranks than cores, and in one of their own.

They do so in turn. A load that comes and goes is the same for two blocks that follow each other, so these are
compared, and the median is of the ratios.
"""

import os
import time
from statistics import median

import torch

import unicomm
from tests.processes.programs.common import hear, say

BLOCKS, MESSAGES = 200, 100

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
everyone = unicomm.new_comm("shm", torch.device("cpu"), name="everyone")
rank = everyone.get_rank()
two = everyone.split([0, 1] if rank < 2 else [2, 3])
x = torch.zeros(2)
times = {everyone: [], two: []}
for _ in range(BLOCKS if rank < 2 else 0):
    for comm in everyone, two:
        two.barrier(False)
        began = time.perf_counter()
        for _ in range(MESSAGES):
            if rank == 0:
                comm.send(x, 1, False)
                comm.recv(x, 1, False)
            else:
                comm.recv(x, 0, False)
                comm.send(x, 0, False)
        times[comm].append(time.perf_counter() - began)
if rank < 2:
    ratios = [a / b for a, b in zip(times[everyone], times[two], strict=True)]
    say("measured", ratio=median(ratios))
hear()  # the other ranks sleep until all have measured
two.finalize()
everyone.finalize()
