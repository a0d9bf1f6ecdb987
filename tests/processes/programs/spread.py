"""Ranks 0 to 2 start on one core, rank 3 on another. Counts the tries that end with as many on both.

It looks several times in a try, as the kernel may move a rank again because of other processes.
"""

import os
import time

import torch

import unicomm
from tests.processes.programs.common import say

TRIES, LOOKS, CALLS = 24, {2: 18, 4: 4}, 16

cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
comm = unicomm.new_comm("shm", torch.device("cpu"), name="spread")
rank, size = comm.get_rank(), comm.get_size()
x = torch.zeros(2)
where, everywhere = torch.zeros(1, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)


def core() -> int:
    with open("/proc/thread-self/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[36])


evened = 0
for _ in range(TRIES):
    os.sched_setaffinity(0, [cores[rank == 3]])
    time.sleep(0.35)  # a rank moves at most every 20 ms, or 300 ms after another process had its core
    comm.barrier(False)
    os.sched_setaffinity(0, cores)
    even = False
    for _ in range(LOOKS[size]):
        for _ in range(CALLS):
            comm.all_reduce(x, unicomm.ReduceOp.SUM, False)
        where.fill_(core())
        comm.all_gather_single(everywhere, where, False)
        even |= int((everywhere == cores[0]).sum()) == size // 2
    evened += even
say("measured", evened=evened, cores=len(os.sched_getaffinity(0)))
comm.finalize()
