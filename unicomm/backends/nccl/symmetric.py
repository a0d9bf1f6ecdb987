"""Which library is behind the symmetric memory of a communicator of NCCL or RCCL: its hint `symmetric`.

`TABLES` has a function for each: given the backend, and whether all ranks are on one host, it returns the
table (csrc/symm/table.hpp as Python has it) or raises `UnsupportedError` with what to do instead. All ranks
have the same hint, and come to the same end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicomm.backends.vendor import shmem as vendors
from unicomm.backends.vendor.device_runtime import ipc_table
from unicomm.comms.errors import UnsupportedError

from .window_heap import WindowTable

if TYPE_CHECKING:
    from .backend import NcclBackend

AUTO = "auto"


def _ipc(backend: NcclBackend, one_host: bool) -> Any:
    if not one_host:
        raise UnsupportedError(
            "the ranks are on several hosts, whose devices cannot open each other's memory",
            hint="use the hint symmetric=windows, the backend 'nvshmem', or ranks of one host: comm.split",
        )
    return ipc_table(backend.vendor.runtime, backend.runtime_path())


#: By the hint's values. What is not there is refused when the hint is read.
TABLES: dict[str, Callable[[NcclBackend, bool], Any]] = {
    "cuda_ipc": _ipc,
    "windows": WindowTable,
    "nvshmem": lambda backend, one_host: vendors.table_of(vendors.NVSHMEM),
}


def table_of(backend: NcclBackend, kind: str, one_host: bool) -> Any:
    """That of the hint's value; `auto` is "cuda_ipc" for ranks of one host, else "windows"."""
    if kind == AUTO:
        kind = "cuda_ipc" if one_host else "windows"
    return TABLES[kind](backend, one_host)
