"""NVSHMEM and rocSHMEM as data: where each is looked for, and how its table is opened."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unicomm import _core
from unicomm.extensions.build_rocshmem import built_unit, unit_path

from .library_search import VendorLibrary

Open = Callable[[str, bool], Any]  # (path, only if the process has loaded it) -> table; raises OSError


@dataclass(frozen=True)
class ShmemVendor(VendorLibrary):
    """What distinguishes SHMEM libraries, beside name and location.

    Attributes:
        open: opens the table of a file.
        version: returns the library's version once its table is open.
        built: returns files that `unicomm build` writes on this machine, whether or not they exist.
    """

    open: Open
    version: Callable[[], str]
    built: Callable[[], Sequence[str]] = tuple


def _nvshmem_version() -> str:
    code = _core.symm_nvshmem_info()[0]
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _open_built(path: str, loaded: bool) -> Any:
    if loaded:
        raise OSError(f"{path} is opened by its path, also if it is loaded")
    return _core.symm_library(path)


NVSHMEM = ShmemVendor(
    "nvshmem",
    "NVSHMEM",
    ("libnvshmem_host.so.3",),
    (("nvidia.nvshmem", "lib/libnvshmem_host.so.3"),),
    "`pip install nvidia-nvshmem-cu13` (or -cu12) installs it; the hint 'library' names another file",
    _core.symm_nvshmem,
    _nvshmem_version,
)
ROCSHMEM = ShmemVendor(
    "rocshmem",
    "rocSHMEM",
    (),
    (),
    "AMD ships no shared library: `unicomm build rocshmem` builds one from your rocSHMEM",
    _open_built,
    lambda: unit.rocshmem if (unit := built_unit()) else "",
    lambda: [str(unit_path())],
)

_opened: dict[str, Any] = {}
_lock = threading.Lock()


def open_table(vendor: ShmemVendor, path: str = "") -> Any:
    """Returns the library's table: of the loaded copy, else of `path`, of a package, or of the system.

    The whole process uses the copy that was opened first. Raises `UnsupportedError` if there is none.
    """
    with _lock:
        if vendor.name not in _opened:
            _opened[vendor.name] = vendor.find(vendor.open, path, vendor.built())
        return _opened[vendor.name]
