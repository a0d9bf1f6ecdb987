"""`torch.distributed._symmetric_memory` and `torch.ops.symm_mem` on CPU tensors.

The allocator and most kernels are C++ (torch_unit/), compiled against the installed torch by
`unicomm build torch-bridge`. torch_kernels.py has the kernels of operations that torch writes in Python.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

from unicomm.c10d import compat
from unicomm.c10d.compat import PrefixStore
from unicomm.comms.errors import CommTimeoutError
from unicomm.comms.failures.faults import rank_list
from unicomm.comms.failures.store_client import StoreClient

from .torch_operators import load_unit, register

#: The backend's own name, and the names of torch's backends, which it takes if this torch lacks them.
NAMES = ("UNICOMM", "CUDA", "NVSHMEM", "NCCL")

_POSTED = b"+"  # before each message, which may be empty, and an empty value is that of no key

_lock = threading.Lock()
_registered: list[Any] = []  # torch drops a library of kernels that nothing references
_next_number = itertools.count(1)
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# By the name of a group: the number of the group that a workspace was made for.
_workspace_numbers: dict[str, int] = {}


def use_in_torch() -> list[str]:
    """Makes torch's symmetric memory work on CPU tensors in this process. A second call does nothing.

    From then on `symm_mem.empty(..., device="cpu")`, `rendezvous`, handles and the operations of
    `torch.ops.symm_mem` run on this host's shared memory, between the processes of any process group.
    `torch_operators()` lists the operations. Without a GPU, `get_symm_mem_workspace` returns such memory too.
    Returns the names that `symm_mem.set_backend` accepts for it. The names of torch's own backends are among
    them if this torch lacks those backends, so that a program written for GPUs needs no change.

    Raises `NotReadyError` when the extension is not built for this torch.
    """
    with _lock:
        if _registered:
            return list(_registered[0])
        unit = load_unit()
        names: list[str] = unit.install(list(NAMES), _exchange, _number_of)
        if not torch.accelerator.is_available():  # torch's own function needs a GPU
            compat.replace_symmetric_workspace(_workspace)
        _registered.extend((names, register(unit)))
        return list(names)


def _workspace(group_name: str, min_size: int) -> Any:
    """`get_symm_mem_workspace` in CPU memory: one workspace a group, which grows on all ranks alike."""
    kept, number = compat.symmetric_workspaces(), _number_of(group_name)
    tensor = kept.get(group_name) if _workspace_numbers.get(group_name) == number else None
    if tensor is None or tensor.nbytes < min_size:
        _workspace_numbers[group_name] = number
        tensor = kept[group_name] = compat.empty_symmetric(min_size, group_name)
    return compat.rendezvous_symmetric(tensor)


def _number_of(name: str) -> int:
    """Returns a number of the process group that now has this name, or 0 if none has it.

    After `destroy_process_group` another group may have the name, with other ranks. It has another number.
    """
    try:
        group = compat.group_of_name(name)
    except RuntimeError:
        return 0
    with _lock:
        if group not in _numbers:
            _numbers[group] = next(_next_number)
        return _numbers[group]


def _exchange(name: str, message: bytes) -> tuple[int, list[bytes], list[int]]:
    """Exchanges a message of each rank among the ranks of a process group, over the group's store.

    Raises `CommTimeoutError` when ranks do not come, or the store does not answer, within the store's
    timeout, which is that of `init_process_group`.
    """
    group = compat.group_of_name(name)
    store: Any = PrefixStore("unicomm-symmetric", compat.store_of_group(group))
    rank, size, limit = group.rank(), group.size(), store.timeout.total_seconds()
    end, client = time.monotonic() + limit, StoreClient(store, name, size, limit)
    number = client.add(f"rounds/{rank}")
    client.put(f"{number}/{rank}", _POSTED + message)
    keys = [f"{number}/{other}" for other in range(size)]
    for key in keys:
        while not client.present([key]):
            if time.monotonic() > end:
                missing = [other for other in range(size) if not client.present([keys[other]])]
                raise CommTimeoutError(
                    f"{rank_list(missing)} of group '{name}' did not arrive at the rendezvous of symmetric"
                    f" memory within {limit:g} s",
                    rank=rank,
                    culprits=missing,
                    hint="all ranks of the group call rendezvous, in the same order",
                )
            client.wait(key, end - time.monotonic())
    answers = [value.removeprefix(_POSTED) for value in client.read(keys)]
    client.delete([f"{number - 1}/{rank}"])  # a rank in this round has read the round before
    return rank, answers, dist.get_process_group_ranks(group)
