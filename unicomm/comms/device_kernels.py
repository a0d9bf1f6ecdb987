"""The kernels of symmetric memory on devices: unicomm/symm/kernels, compiled when they are first needed.

One source for CUDA and HIP, which cupy gives to the compiler that belongs to the device's runtime, NVRTC or
hipRTC. A `Launcher` is all that the rest knows of it: tests have one whose kernels a host compiler made.
"""

from __future__ import annotations

import abc
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import UnsupportedError

FOLDER = Path(__file__).parent.parent / "symm" / "kernels"
OPTIONS = ("-std=c++17",)


def source() -> str:
    """All of it in one text, as run-time compilers take it."""
    text = (FOLDER / "kernels.cu").read_text()
    for header in FOLDER.glob("*.h"):
        text = text.replace(f'#include "{header.name}"', header.read_text().replace("#pragma once\n", ""))
    return text


def _fields() -> tuple[str, ...]:
    """What the kernels' one argument is made of, in its order: whole numbers of 64 bits."""
    found = re.search(r"struct Args \{(.*?)\n\};", (FOLDER / "kernels.cu").read_text(), re.DOTALL)
    assert found is not None
    return tuple(re.findall(r"^\s*Int (\w+);", found[1], re.MULTILINE))


FIELDS = _fields()
INDEX = {name: i for i, name in enumerate(FIELDS)}


class Launcher(abc.ABC):
    """Puts kernels on streams of one device."""

    @abc.abstractmethod
    def launch(self, kernel: str, blocks: int, threads: int, args: NDArray[np.int64], stream: int) -> None:
        """On the stream with that handle. `args`: a number for each of `FIELDS`; is not kept."""

    @abc.abstractmethod
    def host_words(self, count: int) -> torch.Tensor:
        """Zeros, int64, in memory that the host and the device's kernels have at the same address."""


class CupyLauncher(Launcher):
    """Raises `UnsupportedError` where cupy is missing."""

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
        self._module = cupy.RawModule(code=source(), options=OPTIONS)
        self._functions: dict[str, Any] = {}

    def launch(self, kernel: str, blocks: int, threads: int, args: NDArray[np.int64], stream: int) -> None:
        with self._cupy.cuda.Device(self._device):
            function = self._functions.get(kernel)
            if function is None:
                function = self._functions[kernel] = self._module.get_function(kernel)
            with self._cupy.cuda.ExternalStream(stream, self._device):
                function((blocks,), (threads,), (args,))  # an array of the host goes by value

    def host_words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)
