"""Ranks with symmetric memory on devices, over the mocks: symm_device.py HOW

all    every operation
kill   all are at an operation on a stream of its own to which rank 1 never comes: it is killed
late   rank 1 does not come either, and lives
"""

import sys

import torch

import unicomm
from tests.mocks.device import backend as device_mock
from tests.mocks.nccl.kinds import streams_of
from tests.processes.programs.common import hear, reporting, say
from tests.symm.device import device_bodies
from unicomm import symm

HOW = sys.argv[1]
backend = device_mock.make("symm-device")


with unicomm.new_comm("symm-device", torch.device("cpu"), name="main", timeout=60) as comm:
    if HOW == "all":
        device_bodies.all_of_it(comm)
        comm.barrier(False)
    else:
        symm.init(comm)
        x = device_bodies.shared(comm, torch.ones(4))
        say("ready")
        hear()
        streams = streams_of(comm)
        with reporting(), streams.use(streams.new()):
            device_bodies.settled(
                comm, lambda: symm.one_shot_all_reduce(x, comm, timeout=60 if HOW == "kill" else 1)
            )
        del x
say("over")
