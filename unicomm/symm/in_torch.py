"""`torch.distributed._symmetric_memory` and `torch.ops.symm_mem` on CPU tensors.

Their allocator and kernels are C++ (torch_unit/), against the torch that is installed: see
`unicomm build torch-bridge`. What torch keeps in Python is in torch_kernels.py.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _resolve_process_group, _SymmetricMemory
from torch.distributed import distributed_c10d as c10d

from unicomm.comms.errors import CommTimeoutError

from .torch_operators import load_unit, register

#: The name of the backend, and those of torch's own that it stands for where torch has none.
NAMES = ("UNICOMM", "CUDA", "NVSHMEM", "NCCL")

_lock = threading.Lock()
_registered: list[Any] = []  # torch forgets what nobody holds


def use_in_torch() -> list[str]:
    """Makes torch's symmetric memory work on CPU tensors in this process; again it does nothing.

    From then on `symm_mem.empty(..., device="cpu")`, `rendezvous`, handles and the operations of
    `torch.ops.symm_mem` run on this host's shared memory, between the processes of any process group;
    `torch_operators()` lists them. Where there is no GPU, `get_symm_mem_workspace` gives such memory too.
    Returns the names that `symm_mem.set_backend` takes for it: torch's own are among them where this torch
    has no such backend, so that a program written for GPUs may keep its choice.

    Raises `NotReadyError` where the extension is not built for this torch.
    """
    with _lock:
        if _registered:
            return list(_registered[0])
        unit = load_unit()
        names: list[str] = unit.install(list(NAMES), _exchange)
        if not torch.accelerator.is_available():  # torch's own asks for a GPU, of which there is none
            from torch.distributed import _symmetric_memory as symm_mem

            symm_mem.get_symm_mem_workspace = _workspace
        _registered.extend((names, register(unit)))
        return list(names)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = _resolve_process_group(c10d.GroupName(name))
    return group


def _workspace(group_name: c10d.GroupName, min_size: int) -> _SymmetricMemory:
    """`get_symm_mem_workspace` in CPU memory: one for each group, which grows, on all ranks alike."""
    from torch.distributed import _symmetric_memory as symm_mem

    kept = symm_mem._group_name_to_workspace_tensor
    tensor = kept.get(group_name)
    if tensor is None or tensor.nbytes < min_size:
        tensor = _SymmetricMemory.empty_strided_p2p(
            (min_size,), [1], torch.uint8, torch.device("cpu"), group_name
        )
        kept[group_name] = tensor
    return _SymmetricMemory.rendezvous(tensor)


def _exchange(name: str, said: bytes) -> tuple[int, list[bytes], list[int]]:
    """Tells the ranks of a process group what each says, over the group's store."""
    group = _group(name)
    store: Store = PrefixStore("unicomm-symmetric", c10d._get_process_group_store(group))
    rank, size = group.rank(), group.size()
    number = store.add(f"rounds/{rank}", 1)
    store.set(f"{number}/{rank}", said.hex())
    answers = []
    for other in range(size):
        try:
            answers.append(bytes.fromhex(store.get(f"{number}/{other}").decode()))
        except dist.DistStoreError as error:
            raise CommTimeoutError(
                f"rank {other} of group '{name}' did not come to the rendezvous of symmetric memory",
                rank=rank,
                culprits=(other,),
                hint="all ranks of the group call rendezvous, in the same order",
            ) from error
    store.delete_key(f"{number - 1}/{rank}")  # who is in this round has read the one before
    return rank, answers, dist.get_process_group_ranks(group)
