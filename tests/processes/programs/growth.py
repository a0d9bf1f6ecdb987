"""Measures what stays of communicators that ended: growth.py BACKEND TIMES. "bare": torch's own Gloo groups.

Two ranks as threads create and end TIMES of them. Says the bytes that malloc gave and did not get back, and
the blocks of Python objects, each for one creation: the median of several parts, as tables are doubled in
some of them. The first creations, which fill tables of fixed size, do not count.
"""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from statistics import median

import torch.distributed as dist

import unicomm
from tests.processes.programs.common import leave, say

PARTS = 8
SETTLED = 5  # equal readings, one after the other
FIRST = 200  # the recorder's table of 256 communicators is full after 128 of two ranks


class Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = (
        *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
        *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


allocated = ctypes.CDLL(None).mallinfo2
allocated.restype = Allocated


def usage() -> tuple[int, int]:
    """Bytes that malloc has given out, and blocks that Python has, when they have not changed for a while.

    Gloo's threads may still be ending: what they hold is gone soon, on a busy machine later.
    """
    said: list[tuple[int, int]] = []
    while len(said) < SETTLED or len(set(said[-SETTLED:])) > 1:
        if said:
            time.sleep(0.02)
        gc.collect()
        now = allocated()
        said.append((now.uordblks + now.hblkhd, sys.getallocatedblocks()))
        said = said[-SETTLED:]
    return said[-1]


def bare(rank: int, store: dist.Store) -> None:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", interface="", lazy_init=False)
    options._devices = [device]
    dist.ProcessGroupGloo(store, rank, 2, options).barrier().wait()


def ours(rank: int, store: dist.Store) -> None:
    with unicomm.new_comm(backend, "cpu", name="again", store=store, rank=rank, size=2, timeout=60) as comm:
        comm.barrier()


def create(times: int, by: Callable[[int, dist.Store], None]) -> None:
    for _ in range(times):
        store = dist.HashStore()
        ranks = [threading.Thread(target=by, args=(rank, store)) for rank in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()


backend, times = sys.argv[1], int(sys.argv[2])
by = bare if backend == "bare" else ours
create(FIRST, by)
taken = [usage()]
for _ in range(PARTS):
    create(times // PARTS, by)
    taken.append(usage())
grown = [[(b - a) * PARTS / times for a, b in pairwise(values)] for values in zip(*taken, strict=True)]
say("grown", bytes=median(grown[0]), blocks=median(grown[1]), of=grown[0])
leave()
