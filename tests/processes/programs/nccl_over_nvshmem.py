"""NVSHMEM's heap for a communicator of NCCL, over mocks of both: nccl_over_nvshmem.py LIBRARY"""

import sys

import torch

import unicomm
from tests.mocks.device import backend as device_mock
from tests.processes.programs.common import say
from tests.symm.device import device_bodies
from unicomm import _core, symm
from unicomm.backends.vendor import shmem_libraries as vendors

vendors._opened["nvshmem"] = _core.symm_nvshmem(sys.argv[1])
backend = device_mock.make("nccl-mock")
comm = unicomm.new_comm(backend.name, torch.device("cpu"), timeout=60, hints={"symmetric": "nvshmem"})
library = comm.unsafe_backend.symmetric_table()
comm.unsafe_backend.symmetric_table = lambda *_: library
symm.init(comm)
device_bodies.check_collectives(comm, torch.float32, (5, 3), seed=5)
device_bodies.windows(comm)
say("over", library=str(library.name))
comm.barrier(False)
comm.finalize()
