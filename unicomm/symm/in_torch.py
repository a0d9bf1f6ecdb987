"""`torch.distributed._symmetric_memory` and `torch.ops.symm_mem` on CPU tensors.

Their allocator and kernels are C++ (torch_unit/), against the torch that is installed: see
`unicomm build torch-bridge`. What torch keeps in Python is registered here.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _resolve_process_group
from torch.distributed import distributed_c10d as c10d

from unicomm.comms.errors import CommTimeoutError, NotReadyError
from unicomm.comms.torch_bridge import SYMMETRIC, load

#: The name of the backend, and those of torch's own that it stands for where torch has none.
NAMES = ("UNICOMM", "CUDA", "NVSHMEM", "NCCL")

_lock = threading.Lock()
_registered: list[Any] = []  # torch forgets what nobody holds


def use_in_torch() -> list[str]:
    """Makes torch's symmetric memory work on CPU tensors in this process; again it does nothing.

    From then on `symm_mem.empty(..., device="cpu")`, `rendezvous`, handles and the operations of
    `torch.ops.symm_mem` run on this host's shared memory, between the processes of any process group.
    Returns the names that `symm_mem.set_backend` takes for it: torch's own are among them where this torch
    has no such backend, so that a program written for GPUs may keep its choice.

    Raises `NotReadyError` where the extension is not built for this torch.
    """
    with _lock:
        if _registered:
            return list(_registered[0])
        unit = load(SYMMETRIC)
        if unit is None:
            raise NotReadyError(
                f"torch's symmetric memory is not built for torch {torch.__version__}",
                hint="run `unicomm build torch-bridge`, which needs a C++ compiler",
            )
        names: list[str] = unit.install(list(NAMES), _exchange)
        _registered.extend((names, _in_python()))
        return list(names)


def _group(name: str) -> dist.ProcessGroup:
    group: dist.ProcessGroup = _resolve_process_group(c10d.GroupName(name))
    return group


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


def _in_python() -> torch.library.Library:
    """Operations that torch defines in Python, for CUDA only: here by the group's collectives."""
    from torch.distributed import _symmetric_memory as symm_mem

    functional = torch.ops._c10d_functional

    def size_of(name: str) -> int:
        return _group(name).size()

    def all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
        done = functional.all_gather_into_tensor(tensor.contiguous(), size_of(group_name), group_name)
        out: torch.Tensor = functional.wait_tensor(done)
        return out

    def reduce_scatter(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
        done = functional.reduce_scatter_tensor(
            tensor.contiguous(), reduce_op, size_of(group_name), group_name
        )
        out: torch.Tensor = functional.wait_tensor(done)
        return out

    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    kernels = {
        "get_remote_tensors": symm_mem._get_remote_tensors_default,
        "fused_all_gather_matmul": symm_mem._fused_all_gather_matmul_fallback,
        "fused_matmul_reduce_scatter": symm_mem._fused_matmul_reduce_scatter_fallback,
        "_low_contention_all_gather": all_gather,
        "_low_contention_reduce_scatter": reduce_scatter,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    return library
