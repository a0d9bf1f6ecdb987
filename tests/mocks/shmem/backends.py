"""The SHMEM backends over mocks of their libraries: host memory, and streams of host threads.

A process is one rank of it. Where the mock is told so (NVSHMEM_MOCK_HOST_STREAM, HIP_MOCK_HOST_STREAM)
the host is the current stream, so that torch's operations on the tensors are in order with all else.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any, ClassVar

import torch

from tests.mocks.device.backend import HostLauncher
from tests.mocks.nccl.backend import AtOnce, HostStreams
from tests.mocks.nccl.host_device import HostIsStream
from tests.mocks.nvshmem import build as build_nvshmem
from unicomm import _core, register_backend
from unicomm.backends.shmem.backend import NvshmemBackend, RocshmemBackend, ShmemBackend
from unicomm.comms.backend import LaunchesKernels
from unicomm.extensions.build_rocshmem import unit_path


class Mock(AtOnce, ShmemBackend, LaunchesKernels):
    """`path` is a library that has the mock's streams."""

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
        result = self._streams._c.mock_stream_memcpy(stream, *pointers, ctypes.c_size_t(source.nbytes))
        assert result == 0


class MockNvshmem(Mock, NvshmemBackend):
    name = "nvshmem-mock"
    host_stream = "NVSHMEM_MOCK_HOST_STREAM"

    @classmethod
    def path(cls) -> str:
        return os.environ.get("NVSHMEM_MOCK") or str(build_nvshmem.library())

    @classmethod
    def table(cls, path: str = "") -> Any:
        return _core.symm_nvshmem(cls.path())


class MockRocshmem(Mock, RocshmemBackend):
    """The unit is found as by a user: where `unicomm build rocshmem` put it, which XDG_CACHE_HOME says."""

    name = "rocshmem-mock"
    host_stream = "HIP_MOCK_HOST_STREAM"

    @classmethod
    def path(cls) -> str:
        return str(unit_path())  # which depends on the runtime's mock


register_backend(MockNvshmem.name, MockNvshmem)
register_backend(MockRocshmem.name, MockRocshmem)
