"""The SHMEM backends over doubles of their libraries: host memory, and streams of host threads.

A process is one rank of it. Where the double is told so (NVSHMEM_DOUBLE_HOST_STREAM, HIP_DOUBLE_HOST_STREAM)
the host is the current stream, so that torch's operations on the tensors are in order with all else.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from unicomm import _core, register_backend
from unicomm.backends.shmem.backend import NvshmemBackend, RocshmemBackend, ShmemBackend
from unicomm.extensions.build_rocshmem import unit_path

sys.path.insert(0, str(Path(__file__).parent.parent / "nvshmem_double"))
sys.path.insert(0, str(Path(__file__).parent.parent / "nccl"))
sys.path.insert(0, str(Path(__file__).parent.parent / "device_double"))
import build_nvshmem
from device_double import HostLauncher
from double_backend import AtOnce, HostStreams
from host_device import HostIsStream


class Double(AtOnce, ShmemBackend):
    """`path` is a library that has the double's streams."""

    capabilities = replace(ShmemBackend.capabilities, device_types=frozenset({"cpu"}))
    host_stream: ClassVar[str]

    @classmethod
    def path(cls) -> str:
        raise NotImplementedError

    @classmethod
    def device_streams(cls, device: torch.device) -> HostStreams:
        kind = HostIsStream if os.environ.get(cls.host_stream) else HostStreams
        return kind(cls.path())

    def kernels(self, device: torch.device) -> HostLauncher:
        return HostLauncher(self.path())

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pointers = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        stream = ctypes.c_void_p(self._stream())
        result = self._streams._c.double_stream_memcpy(stream, *pointers, ctypes.c_size_t(source.nbytes))
        assert result == 0


class NvshmemDouble(Double, NvshmemBackend):
    name = "nvshmem-double"
    host_stream = "NVSHMEM_DOUBLE_HOST_STREAM"

    @classmethod
    def path(cls) -> str:
        return os.environ.get("NVSHMEM_DOUBLE") or str(build_nvshmem.library())

    @classmethod
    def table(cls, path: str = "") -> Any:
        return _core.symm_nvshmem(cls.path())


class RocshmemDouble(Double, RocshmemBackend):
    """The unit is found as by a user: where `unicomm build rocshmem` put it, which XDG_CACHE_HOME says."""

    name = "rocshmem-double"
    host_stream = "HIP_DOUBLE_HOST_STREAM"

    @classmethod
    def path(cls) -> str:
        return str(unit_path())  # which depends on the runtime's double


register_backend(NvshmemDouble.name, NvshmemDouble)
register_backend(RocshmemDouble.name, RocshmemDouble)
