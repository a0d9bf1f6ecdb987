"""The SHMEM backend over the table of this host's memory, for CPU tensors, as backend "host-shmem"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unicomm import _core, register_backend
from unicomm.backends.shmem.backend import ShmemBackend
from unicomm.backends.vendor.shmem_libraries import ShmemVendor
from unicomm.comms.operations.symmetric_table import Capability

NAME = "host-shmem"


class HostShmem(ShmemBackend):
    name = NAME
    library = "host memory"
    vendor = ShmemVendor(NAME, "host memory", (), (), "", lambda path, loaded: None, lambda: "")
    capabilities = replace(ShmemBackend.capabilities, device_types=frozenset({"cpu"}))

    @classmethod
    def table(cls, path: str = "") -> Any:
        return _core.symm_host()

    @classmethod
    def device_streams(cls, device: Any) -> None:
        return None


class Staging(HostShmem):
    """Where no rank can address another's memory."""

    name = "host-shmem-staging"

    @classmethod
    def table(cls, path: str = "") -> Any:
        return _core.symm_host().limited(int(~Capability.POINTER))


register_backend(HostShmem.name, HostShmem)
register_backend(Staging.name, Staging)
