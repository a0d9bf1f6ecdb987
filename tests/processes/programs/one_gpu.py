"""Ranks that share one GPU, or the mocks for it, have symmetric memory: one_gpu.py gpu|mock"""

import sys
from dataclasses import replace

import torch

import unicomm
from tests.gpu.staged import Staged
from tests.processes.programs.common import say
from tests.symm.device import device_bodies

if sys.argv[1] == "gpu":
    device, backend = torch.device("cuda", 0), Staged
    torch.cuda.set_device(device)
else:
    from tests.mocks.device import backend as device_mock
    from unicomm.backends.vendor.device_runtime import CUDA, ipc_table
    from unicomm.comms.backend import LaunchesKernels

    base = device_mock.make("symm-device")
    device = torch.device("cpu")

    class backend(Staged, LaunchesKernels):  # noqa: N801
        capabilities = replace(Staged.capabilities, device_types=frozenset({"cpu"}))

        @classmethod
        def device_streams(cls, device):
            return base.device_streams(device)

        def kernels(self, device):
            return device_mock.HostLauncher(base.path)

        def symmetric_table(self, one_host=True):
            return ipc_table(CUDA, str(device_mock.runtime()))


unicomm.register_backend(backend.name, backend)
with unicomm.new_comm(backend.name, device, name="main", timeout=60) as comm:
    assert comm.get_device() == device
    # Processes that take turns on a GPU wait long for each other: not all types with all numbers of ranks.
    device_bodies.all_of_it(comm, more=device.type == "cuda" and comm.get_size() == 2)
    comm.barrier(False)
say("over")
