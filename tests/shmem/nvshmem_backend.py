"""The backend nvshmem over the double of tests/nvshmem_double: host memory, and streams of host threads.

A process is one rank of it. Where NVSHMEM_DOUBLE_HOST_STREAM is set the host is the current stream, so that
torch's operations on the tensors are in order with all else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unicomm import _core, register_backend
from unicomm.backends.shmem.backend import NvshmemBackend

sys.path.insert(0, str(Path(__file__).parent.parent / "nvshmem_double"))
sys.path.insert(0, str(Path(__file__).parent.parent / "nccl"))
sys.path.insert(0, str(Path(__file__).parent.parent / "device_double"))
import build_nvshmem
from device_double import HostLauncher
from double_backend import AtOnce, HostStreams
from host_device import HostIsStream

NAME = "nvshmem-double"


class NvshmemDouble(AtOnce, NvshmemBackend):
    name = NAME
    capabilities = replace(NvshmemBackend.capabilities, device_types=frozenset({"cpu"}))

    @classmethod
    def path(cls) -> str:
        return os.environ.get("NVSHMEM_DOUBLE") or str(build_nvshmem.library())

    @classmethod
    def table(cls, path: str = "") -> Any:
        return _core.symm_nvshmem(cls.path())

    @classmethod
    def device_streams(cls, device: torch.device) -> HostStreams:
        kind = HostIsStream if os.environ.get("NVSHMEM_DOUBLE_HOST_STREAM") else HostStreams
        return kind(cls.path())

    def kernels(self, device: torch.device) -> HostLauncher:
        return HostLauncher(self.path())

    @classmethod
    def on_device(cls, device: torch.device) -> Any:
        return contextlib.nullcontext()

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pointers = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        stream = ctypes.c_void_p(self._stream())
        result = self._streams._c.double_stream_memcpy(stream, *pointers, ctypes.c_size_t(source.nbytes))
        assert result == 0


register_backend(NAME, NvshmemDouble)
