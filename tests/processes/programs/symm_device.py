"""Ranks with symmetric memory on devices, over the doubles: symm_device.py HOW

all    every operation; what is left after finalize
kill   all are at an operation on a stream of its own to which rank 1 never comes: it is killed
late   rank 1 does not come either, and lives
"""

import gc
import os
import sys
import time
from pathlib import Path

import torch
from common import hear, reporting, say

import unicomm
from unicomm import symm

sys.path.insert(0, str(Path(__file__).parents[2] / "device_double"))
import device_bodies
import device_double

HOW = sys.argv[1]
backend = device_double.make("symm-device")


def memfds():
    """How many pieces of the double's device memory this process has mapped."""
    return sum("cudart-double" in line for line in Path("/proc/self/maps").read_text().splitlines())


if HOW == "all":  # others may have the last one's memory open when it goes; the next one looks after it
    for _ in range(2):
        with unicomm.new_comm("symm-device", "cpu", name="before", timeout=60) as comm:
            symm.init(comm)
    del comm  # its engine holds the memory
with unicomm.new_comm("symm-device", torch.device("cpu"), name="main", timeout=60) as comm:
    if HOW == "all":
        device_bodies.all_of_it(comm)
        comm.barrier(False)
    else:
        symm.init(comm)
        x = device_bodies.shared(comm, torch.ones(4))
        say("ready")
        hear()
        streams = comm._engine.queue.streams
        with reporting(), streams.use(streams.new()):
            device_bodies.settled(
                comm, lambda: symm.one_shot_all_reduce(x, comm, timeout=60 if HOW == "kill" else 1)
            )
        del x
deadline = time.monotonic() + 10
while memfds() > 1 and time.monotonic() < deadline:  # the watchdog's thread may hold it a moment longer
    gc.collect()
    os.sched_yield()
say("over", left=memfds())  # of its own, and the others' none
