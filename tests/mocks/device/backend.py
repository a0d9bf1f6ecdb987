"""Symmetric memory of devices over mocks: the CUDA runtime's (tests/mocks/cudart), the streams and the
communicator of NCCL's (tests/mocks/nccl), and the kernels of unicomm/symm/kernels by the host's compiler.

All are in host memory, which torch has as CPU tensors. `make` gives a backend of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.mocks.nccl.build import NoCompiler, compiler
from unicomm.comms.backend import LaunchesKernels
from unicomm.comms.memory.device_kernels import FIELDS, FOLDER, Launcher

__all__ = ["HostLauncher", "NoCompiler", "compiled", "kernels", "make", "runtime"]
HERE = Path(__file__).parent
MOCKS = HERE.parent
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
]
_THREADS = 5  # of a block: no kernel may count on more, nor on a power of two


def compiled(name: str, sources: Sequence[Path], *flags: str) -> Path:
    """A library of the first of `sources`, made once for what all of them say. Raises NoCompiler."""
    command = [*compiler(), *FLAGS, *flags]
    key = hashlib.sha256(shlex.join(command).encode())
    for source in sources:
        key.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"unicomm-device-mock-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"lib{name}-{key.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes compiles
        if not path.exists():
            part = path.with_suffix(".part")
            subprocess.run([*command, "-o", str(part), str(sources[0])], check=True, timeout=100)
            part.rename(path)
    return path


@cache
def runtime() -> Path:
    """The mock of the CUDA runtime."""
    return compiled("cudart", [MOCKS / "cudart" / "library.cpp"])


@cache
def kernels() -> Path:
    """The kernels, compiled for the host."""
    sources = [HERE / "kernels.cpp", HERE / "device.hpp", FOLDER / "kernels.cu", *sorted(FOLDER.glob("*.h"))]
    return compiled("kernels", sources, f"-I{FOLDER}", f"-I{HERE}", "-fvisibility=hidden")


class HostLauncher(Launcher):
    """Runs kernels in the streams of the mock at that path; on the default stream before it returns."""

    def __init__(self, streams_path: str) -> None:
        self._streams = ctypes.CDLL(streams_path)
        self._library = ctypes.CDLL(str(kernels()))
        self._library.mock_launch.restype = ctypes.c_void_p
        assert self._library.mock_args() == len(FIELDS)
        self.launched: list[str] = []

    def launch(self, kernel: str, blocks: int, threads: int, args: NDArray[np.int64], stream: int) -> None:
        assert threads >= _THREADS
        assert args.dtype == np.int64
        assert args.shape == (len(FIELDS),)
        self.launched.append(kernel)
        function = ctypes.cast(self._library[kernel], ctypes.c_void_p)
        launch = self._library.mock_launch(
            function, ctypes.c_uint(blocks), ctypes.c_uint(_THREADS), ctypes.c_void_p(args.ctypes.data)
        )
        handle, run = ctypes.c_void_p(stream), ctypes.cast(self._library.mock_run, ctypes.c_void_p)
        assert self._streams.mock_stream_host_function(handle, run, ctypes.c_void_p(launch)) == 0
        if not stream:
            assert self._streams.mock_stream_synchronize(handle) == 0

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)


def make(name: str) -> type[Any]:
    """A backend of the mocks, registered under that name. Skips without a compiler."""
    from tests.mocks.nccl.host_device import make_host_device
    from unicomm import register_backend

    base = make_host_device(f"{name}-device")
    streams = ctypes.CDLL(base.path)
    use = ctypes.CDLL(str(runtime())).mock_use_streams
    use(streams.mock_stream_memcpy, streams.mock_stream_synchronize)

    class MockDevice(base, LaunchesKernels):  # type: ignore[misc, valid-type]
        @classmethod
        def runtime_path(cls) -> str:
            return str(runtime())

        def kernels(self, device: torch.device) -> HostLauncher:
            return HostLauncher(self.path)

    MockDevice.name = name
    register_backend(name, MockDevice)
    return MockDevice
