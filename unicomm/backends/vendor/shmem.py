"""The SHMEM libraries, as data: where each is, and how its table is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unicomm import _core
from unicomm.extensions.rocshmem import built, unit_path

from .library import VendorLibrary

Open = Callable[[str, bool], Any]  # by a path, or only if it is in the process already; raises OSError


@dataclass(frozen=True)
class Vendor(VendorLibrary):
    """What tells SHMEM libraries apart besides.

    Attributes:
        open: the table of a file. version: of the library, once its table is open.
        made: files of it that this machine has built, or would.
    """

    open: Open
    version: Callable[[], str]
    made: Callable[[], Sequence[str]] = tuple


def _nvshmem_version() -> str:
    code = _core.symm_nvshmem_info()[0]
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _open_built(path: str, loaded: bool) -> Any:
    if loaded:  # it is the same object then
        raise OSError(f"{path} is opened by its path")
    return _core.symm_library(path)


NVSHMEM = Vendor(
    "nvshmem",
    "NVSHMEM",
    ("libnvshmem_host.so.3",),
    (("nvidia.nvshmem", "lib/libnvshmem_host.so.3"),),
    "`pip install nvidia-nvshmem-cu13` (or -cu12) brings it; or name its file by the hint 'library'",
    _core.symm_nvshmem,
    _nvshmem_version,
)
ROCSHMEM = Vendor(
    "rocshmem",
    "rocSHMEM",
    (),
    (),
    "AMD has no shared library of it: `unicomm build rocshmem` makes one from yours",
    _open_built,
    lambda: unit.rocshmem if (unit := built()) else "",
    lambda: [str(unit_path())],
)

_opened: dict[str, Any] = {}
_lock = threading.Lock()


def table_of(vendor: Vendor, path: str = "") -> Any:
    """The library's table: of the copy in the process, else of `path`, of a package, or of the system.

    The first counts for the process. Raises `UnsupportedError` where there is none.
    """
    with _lock:
        if vendor.name not in _opened:
            _opened[vendor.name] = vendor.find(vendor.open, path, vendor.made())
        return _opened[vendor.name]
