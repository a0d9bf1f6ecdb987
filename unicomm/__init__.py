"""unicomm: one communicator for PyTorch, with a flight recorder that is always on.

General layout. The first half runs a job:

    comms/            the communicator, how its operations run and fail, and the backend protocol
    backends/         what moves data: shm, gloo, hosts, mpi, nccl and rccl, nvshmem and rocshmem, fake, auto;
                      and the registry, with `new_comm`
    c10d/             torch.distributed on communicators: process group, operators, DeviceMesh, the switch
    symm/             symmetric memory: one-sided access, collectives, the exchange of a mixture of experts
    torchcomms/       torchcomms' interface, for programs that import torchcomms
    hooks.py          hooks to register with communicators
    functional.py     another name of c10d.functional
    extensions/       optional parts that are compiled on the user's machine
    _core             the native core (csrc): shared memory, reductions, recorder, tables of GPU libraries

The second half looks at jobs:

    flight_recorder/  the ring that every process writes, and the analyzer that reads it
    profiler/         operations of all ranks on one timeline, from torch.profiler's traces
    rehearse/         programs run as many ranks that move nothing: whether their operations fit together
    launch/           the `unicomm` command: run, trace, profile, doctor, build; live ranks in notebooks
    testing/          ranks as threads, and the conformance suite, for other people's tests

`backends`, `c10d`, `symm` and `profiler` import `comms`; `torchcomms` imports `c10d`; `comms` imports the
recorder and no backend; the recorder imports the core only; `launch` may import all. docs/architecture.md has
the picture, and tests/test_rooms.py the rules.

Names below are loaded when first used: reading a recorder's ring needs neither torch nor a backend, and
importing unicomm loads no backend that is not used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unicomm.backends.registry import backend_names, new_comm, register_backend
    from unicomm.comms.batch import BatchSendRecv, P2POp
    from unicomm.comms.communicator import Communicator, TorchComm
    from unicomm.comms.errors import (
        AbortedError,
        BackendError,
        CommError,
        CommTimeoutError,
        DeadlockError,
        InvalidArgumentError,
        MismatchError,
        NotReadyError,
        PeerLostError,
        SilentCorruptionError,
        UnsupportedError,
    )
    from unicomm.comms.memory.allocator import MemAllocator, empty
    from unicomm.comms.memory.window import Window
    from unicomm.comms.operations.reduction import RedOpType, ReduceOp
    from unicomm.comms.operations.table import OpName
    from unicomm.comms.options import CommOptions
    from unicomm.comms.work import TorchWork, Work, WorkStatus, wait_all

    from . import hooks as hooks
    from . import symm as symm
    from .c10d import functional
    from .comms import objects as objcol

_WHERE = {
    "backends.registry": "backend_names new_comm register_backend",
    "comms.batch": "BatchSendRecv P2POp",
    "comms.communicator": "Communicator TorchComm",
    "comms.errors": "AbortedError BackendError CommError CommTimeoutError DeadlockError InvalidArgumentError"
    " MismatchError NotReadyError PeerLostError SilentCorruptionError UnsupportedError",
    "comms.memory.allocator": "MemAllocator empty",
    "comms.operations.table": "OpName",
    "comms.options": "CommOptions",
    "comms.operations.reduction": "RedOpType ReduceOp",
    "comms.window": "Window",
    "comms.work": "TorchWork Work WorkStatus wait_all",
}
_NAMES = {name: module for module, names in _WHERE.items() for name in names.split()}
_MODULES = {
    "flight_recorder": "flight_recorder",
    "functional": "c10d.functional",
    "objcol": "comms.objects",
    "hooks": "hooks",
    "launch": "launch",
    "profiler": "profiler",
    "symm": "symm",
    "testing": "testing",
    "torchcomms": "torchcomms",
}

__all__ = [
    "AbortedError",
    "BackendError",
    "BatchSendRecv",
    "CommError",
    "CommOptions",
    "CommTimeoutError",
    "Communicator",
    "DeadlockError",
    "InvalidArgumentError",
    "MemAllocator",
    "MismatchError",
    "NotReadyError",
    "OpName",
    "P2POp",
    "PeerLostError",
    "RedOpType",
    "ReduceOp",
    "SilentCorruptionError",
    "TorchComm",
    "TorchWork",
    "UnsupportedError",
    "Window",
    "Work",
    "WorkStatus",
    "__version__",
    "backend_names",
    "empty",
    "functional",
    "hooks",
    "new_comm",
    "objcol",
    "register_backend",
    "symm",
    "wait_all",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"unicomm.{_NAMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"unicomm.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'unicomm' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
