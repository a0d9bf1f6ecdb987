"""Measures what stays of communicators that ended: growth.py BACKEND TIMES. "bare": torch's own Gloo groups.

Two ranks as threads create and end TIMES of them. Says the bytes that malloc gave and did not get back, and
the blocks of Python objects, each for one creation. The first creations, which fill tables of fixed size, do
not count.
"""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

import unicomm
from tests.processes.programs.common import leave, say

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
    """Bytes that malloc has given out, and blocks that Python has."""
    gc.collect()
    now = allocated()
    return now.uordblks + now.hblkhd, sys.getallocatedblocks()


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
before = usage()
create(times, by)
after = usage()
say("grown", bytes=(after[0] - before[0]) / times, blocks=(after[1] - before[1]) / times)
leave()
