"""NVSHMEM's heap for a communicator of NCCL, over doubles of both: nccl_over_nvshmem.py LIBRARY"""

import sys
from pathlib import Path

import torch
from common import say

import unicomm
from unicomm import _core, symm
from unicomm.backends.vendor import shmem_libraries as vendors

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "device_double"))
import device_bodies
import device_double

vendors._opened["nvshmem"] = _core.symm_nvshmem(sys.argv[1])
backend = device_double.make("nccl-double")
comm = unicomm.new_comm(backend.name, torch.device("cpu"), timeout=60, hints={"symmetric": "nvshmem"})
symm.init(comm)
device_bodies.check_collectives(comm, torch.float32, (5, 3), seed=5)
device_bodies.windows(comm)
say("over", library=comm._engine.symmetric.library)
comm.barrier(False)
comm.finalize()
