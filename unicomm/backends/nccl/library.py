"""Finding and opening the vendor's library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unicomm import _core
from unicomm.backends.vendor.device_runtime import CUDA, HIP, Runtime
from unicomm.backends.vendor.library import VendorLibrary
from unicomm.comms.errors import BackendError, CommError, UnsupportedError

from . import library_log
from .causes import known_cause
from .errors import IN_PROGRESS, SUCCESS, error_of, log_text


@dataclass(frozen=True)
class Vendor(VendorLibrary):
    """What tells NCCL and RCCL apart besides.

    Attributes:
        fp8_since: the version that brought float8; None where its meaning depends on the GPU.
        built: whether this torch is built for its GPUs.
        runtime: of its GPUs.
    """

    fp8_since: int | None
    built: Callable[[], bool]
    runtime: Runtime


NCCL = Vendor(
    "nccl",
    "NCCL",
    ("libnccl.so.2", "libnccl.so"),
    (("nvidia.nccl", "lib/libnccl.so.2"), ("torch", "lib/libnccl.so.2")),
    "install a torch for CUDA, which brings it, or `pip install unicomm[cuda]`",
    22400,
    lambda: torch.version.cuda is not None,
    CUDA,
)
RCCL = Vendor(
    "rccl",
    "RCCL",
    ("librccl.so.1", "librccl.so"),
    (("torch", "lib/librccl.so"), ("torch", "lib/librccl.so.1")),
    "install a torch for ROCm, which brings it",
    None,  # gfx942 has other float8 types under the same numbers
    lambda: torch.version.hip is not None,
    HIP,
)


class Library:
    """An opened library. Its methods raise where the C functions return a result."""

    def __init__(self, vendor: Vendor, native: Any) -> None:
        self.vendor = vendor
        self.native = native
        self.version: int = native.version
        self._there = {name for name, _, there in native.functions() if there}
        self._log: library_log.LibraryLog | None = None
        self._listening = False
        self._lock = threading.Lock()

    def listen(self) -> int:
        """Keeps the library's log from now on, where it may; returns a mark for `said`."""
        with self._lock:
            if not self._listening:
                self._listening = True
                self._log = library_log.listen(self.native)
        return 0 if self._log is None else self._log.mark()

    def said(self, comm: int = 0, since: int = 0) -> tuple[str, list[str]]:
        """The library's last error, "" for none, and the last lines of its log behind a mark."""
        words = " ".join(self.native.last_error(comm).split())
        if self._log is None:
            return words, []
        return "" if self._log.is_noise(words) else words, self._log.lines(since)

    def trim_log(self) -> None:
        if self._log is not None:
            self._log.trim()

    def has(self, function: str) -> bool:
        """Whether it has that function, by its C name without the prefix."""
        return function in self._there

    def need(self, function: str, what: str) -> None:
        """Raises `UnsupportedError` when it lacks the function that `what` needs."""
        if not self.has(function):
            since = next(since for name, since, _ in self.native.functions() if name == function)
            raise UnsupportedError(
                f"{self.vendor.title} {version_text(self.version)} has no nccl{function}, which {what} needs",
                hint=f"it came with NCCL {version_text(since)}: install a newer one",
            )

    def check(self, what: str, result: int, comm: int = 0, since: int = 0) -> None:
        """Raises for a result that is an error. `since`: a mark; what the log had before is not about it."""
        if result not in (SUCCESS, IN_PROGRESS):
            raise self.error(what, result, comm, since)

    def error(self, what: str, result: int, comm: int = 0, since: int = 0) -> CommError:
        words, lines = self.said(comm, since)
        return error_of(self.vendor.title, what, result, words or self.native.error_string(result), lines)


def version_text(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


_opened: dict[str, Library] = {}
_lock = threading.Lock()


def open_library(vendor: Vendor) -> Library:
    """The one copy that this process uses: the one in memory, else torch's, else the system's.

    Two copies in one process would each believe to own the GPU's connections. Raises `UnsupportedError`.
    """
    with _lock:
        if vendor.name not in _opened:
            _opened[vendor.name] = Library(vendor, vendor.find(_core.NcclLibrary))
        return _opened[vendor.name]


def not_in_time(library: Library, what: str, timeout: float, since: int) -> BackendError:
    """Of a creation: all ranks are there by then. `since`: a mark of the log where it began."""
    title = library.vendor.title
    _, lines = library.said(since=since)
    return BackendError(
        f"{title} {what} did not return within {timeout:g} s{log_text(title, lines)}",
        hint=known_cause("\n".join(lines))
        or "all ranks have come, so the library cannot connect them: NCCL_DEBUG=INFO shows where it is; "
        "NCCL_SOCKET_IFNAME chooses the network",
    )
