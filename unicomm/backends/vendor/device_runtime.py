"""The CUDA and HIP runtime libraries, by which processes of one host share device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unicomm import _core
from unicomm.comms.errors import UnsupportedError

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """What distinguishes the two runtimes: the prefix of their functions, and their file names."""

    title: str
    prefix: str
    file: str
    sonames: tuple[str, ...]


CUDA = Runtime("CUDA runtime", "cuda", "libcudart", ("libcudart.so.13", "libcudart.so.12", "libcudart.so"))
HIP = Runtime("HIP runtime", "hip", "libamdhip64", ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"))


def ipc_table(runtime: Runtime, path: str = "") -> Any:
    """Returns the table of symmetric memory over device memory that processes of one host share by handles.

    `path` is the library's file. By default it is the copy that the process has loaded, as torch loads one,
    else the system's. Raises `UnsupportedError` if there is none.
    """
    return _first(runtime, path, lambda place: _core.symm_cuda_ipc(place, runtime.prefix))


def copies(runtime: Runtime, path: str = "") -> tuple[int, int, int]:
    """Returns the addresses of MemcpyAsync, StreamQuery and GetLastError.

    For `path` and the error see `ipc_table`.
    """
    copy, query, last_error = _addresses(runtime, path, "MemcpyAsync", "StreamQuery", "GetLastError")
    return copy, query, last_error


def device_setter(runtime: Runtime) -> int:
    """Returns the address of SetDevice. For the error see `ipc_table`."""
    return _addresses(runtime, "", "SetDevice")[0]


def _addresses(runtime: Runtime, path: str, *names: str) -> list[int]:
    library = _first(runtime, path, ctypes.CDLL)
    found = [getattr(library, runtime.prefix + name) for name in names]
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found]


def _first(runtime: Runtime, path: str, use: Callable[[str], T]) -> T:
    tried = []
    for place in [path] if path else [*_loaded(runtime), *runtime.sonames]:
        try:
            return use(place)
        except OSError as error:
            tried.append(str(error))
    raise UnsupportedError(
        f"the {runtime.title} is not on this machine: {'; '.join(tried)}",
        hint="install a torch for this machine's GPUs, which brings it",
    )


def _loaded(runtime: Runtime) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    found = (line.split(maxsplit=5)[-1] for line in maps if runtime.file in line)
    return list(dict.fromkeys(found))
