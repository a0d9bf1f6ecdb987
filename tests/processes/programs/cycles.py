"""Creates and finalizes communicators again and again: cycles.py BACKEND TIMES"""

import os
import sys
import time

import torch

import unicomm
from tests.processes.programs.common import say


def usage() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


backend, times = sys.argv[1], int(sys.argv[2])
seen = []
for _ in range(times):
    with unicomm.new_comm(backend, torch.device("cpu"), name="again", timeout=60) as comm:
        comm.all_reduce(torch.ones(10), unicomm.ReduceOp.SUM, True).wait()
    deadline = time.monotonic() + 5
    while seen and usage() > seen[-1] and time.monotonic() < deadline:
        os.sched_yield()  # a thread that was joined is gone only when the kernel has ended it
    seen.append(usage())
say("usage", descriptors=[fds for fds, _ in seen], threads=[threads for _, threads in seen])
