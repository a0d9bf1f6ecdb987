"""Compiles and launches the kernels of symmetric memory on devices (unicomm/symm/kernels).

CUDA and HIP share one source, which cupy compiles by NVRTC or hipRTC. Other files know only the interface
`Launcher`; the tests have one whose kernels a host compiler made.
"""

from __future__ import annotations

import abc
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import unicomm
from unicomm.comms.errors import UnsupportedError

FOLDER = Path(unicomm.__file__).parent / "symm" / "kernels"
OPTIONS = ("-std=c++17",)


def source() -> str:
    """The whole source as one text, for a run-time compiler."""
    text = (FOLDER / "kernels.cu").read_text()
    for header in FOLDER.glob("*.h"):
        text = text.replace(f'#include "{header.name}"', header.read_text().replace("#pragma once\n", ""))
    return text


def _fields() -> tuple[str, ...]:
    """The fields of the kernels' one argument, in order: integers of 64 bits."""
    found = re.search(r"struct Args \{(.*?)\n\};", (FOLDER / "kernels.cu").read_text(), re.DOTALL)
    assert found is not None
    return tuple(re.findall(r"^\s*Int (\w+);", found[1], re.MULTILINE))


def _kernels() -> tuple[str, ...]:
    text = source()
    named = re.findall(r"__global__ void (symm_\w+)\(", text)
    reduced = re.findall(r"^SYMM_REDUCE\((\w+),", text, re.MULTILINE)
    return (*(name for name in named if name != "symm_reduce_"), *(f"symm_reduce_{t}" for t in reduced))


FIELDS = _fields()
INDEX = {name: i for i, name in enumerate(FIELDS)}
KERNELS = _kernels()


class Launcher(abc.ABC):
    """Launches kernels on streams of one device."""

    @abc.abstractmethod
    def launch(self, kernel: str, blocks: int, threads: int, args: NDArray[np.int64], stream: int) -> None:
        """Launches a kernel on the stream with that handle. `args`: one number per field; not kept."""

    @abc.abstractmethod
    def host_words(self, count: int) -> torch.Tensor:
        """Zeros of int64 in memory that the host and the kernels see at the same address."""


def by_value(args: NDArray[np.int64]) -> NDArray[Any]:
    """The numbers as one struct: cupy passes a host array by value only if it has one element."""
    return args.view(f"V{args.nbytes}")


class _Stream:
    """A foreign stream, by cupy's protocol for streams."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class CupyLauncher(Launcher):
    """Launches by cupy. Raises `UnsupportedError` if cupy is missing or cannot compile the kernels."""

    def __init__(self, device: torch.device) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UnsupportedError(
                f"symmetric memory of {device} needs cupy to compile its kernels ({error})",
                hint="pip install 'unicomm[device]' for CUDA 13, 'unicomm[device-cuda12]' or "
                "'unicomm[device-rocm]'",
            ) from error
        self._cupy: Any = cupy
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._streams: dict[int, Any] = {}
        # Load all kernels now. Loading one later would end the capture of a graph, and may wait for a running
        # kernel, which may wait for this rank.
        try:
            with cupy.cuda.Device(self._device):
                module = cupy.RawModule(code=source(), options=OPTIONS)
                self._functions = {name: module.get_function(name) for name in KERNELS}
                for function in self._functions.values():
                    _ = function.kernel if torch.version.hip else function.num_regs
        except Exception as error:  # of the compiler, the driver or cupy
            raise UnsupportedError(
                f"cupy cannot compile the kernels of symmetric memory for {device}: "
                f"{str(error).partition(chr(10))[0]}",
                hint="is this the cupy for the CUDA of this torch, and is its compiler (NVRTC) installed? "
                "python -c 'import cupy; cupy.show_config()' says",
            ) from error

    def launch(self, kernel: str, blocks: int, threads: int, args: NDArray[np.int64], stream: int) -> None:
        with self._cupy.cuda.Device(self._device), self._stream(stream):
            self._functions[kernel]((blocks,), (threads,), (by_value(args),))

    def _stream(self, handle: int) -> Any:
        if (found := self._streams.get(handle)) is None:
            cuda = self._cupy.cuda
            if hasattr(cuda.Stream, "from_external"):  # since cupy 14, which deprecates the other
                found = cuda.Stream.from_external(_Stream(handle))
            else:
                found = cuda.ExternalStream(handle, self._device)
            self._streams[handle] = found
        return found

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)
