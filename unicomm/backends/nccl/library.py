"""NCCL and RCCL as data, and `Library`: an opened copy, which turns result codes into errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unicomm import _core
from unicomm.backends.vendor.device_runtime import CUDA, HIP, Runtime, device_setter
from unicomm.backends.vendor.library_search import VendorLibrary
from unicomm.comms.errors import BackendError, CommError, UnsupportedError

from . import library_log
from .known_causes import known_cause
from .result_codes import IN_PROGRESS, SUCCESS, error_of, log_text


@dataclass(frozen=True)
class NcclVendor(VendorLibrary):
    """What distinguishes NCCL from RCCL, beside name and location.

    Attributes:
        fp8_since: first version that reduces float8; None if the library's float8 types depend on the GPU.
        built: returns whether this torch is built for the vendor's GPUs.
        runtime: runtime library of the vendor's GPUs.
    """

    fp8_since: int | None
    built: Callable[[], bool]
    runtime: Runtime


NCCL = NcclVendor(
    "nccl",
    "NCCL",
    ("libnccl.so.2", "libnccl.so"),
    (("nvidia.nccl", "lib/libnccl.so.2"), ("torch", "lib/libnccl.so.2")),
    "install a torch for CUDA, which brings it, or `pip install unicomm[cuda]`",
    22400,
    lambda: torch.version.cuda is not None,
    CUDA,
)
RCCL = NcclVendor(
    "rccl",
    "RCCL",
    ("librccl.so.1", "librccl.so"),
    (("torch", "lib/librccl.so"), ("torch", "lib/librccl.so.1")),
    "install a torch for ROCm, which brings it",
    None,  # gfx942 has other float8 types under the same codes
    lambda: torch.version.hip is not None,
    HIP,
)


class Library:
    """An opened library. `native` is its table of C functions, which return result codes."""

    def __init__(self, vendor: NcclVendor, native: Any, set_device: Callable[[], int] | None = None) -> None:
        """`set_device` returns the address of the function of the device's runtime by which a thread chooses
        its device; by default that of the vendor's runtime."""
        self.vendor = vendor
        self.native = native
        self._set_device = set_device or partial(device_setter, vendor.runtime)
        self.version: int = native.version
        self._present = {name for name, _, present in native.functions() if present}
        self._log: library_log.LibraryLog | None = None
        self._log_started = False
        self._lock = threading.Lock()

    def start_log(self) -> int:
        """Keeps the library's log from now on, where possible. Returns the log's current position."""
        with self._lock:
            if not self._log_started:
                self._log_started = True
                self._log = library_log.start(self.native)
        return 0 if self._log is None else self._log.position()

    def last_error(self, comm: int = 0, since: int = 0) -> tuple[str, list[str]]:
        """Returns the text of the library's last error, or "", and the last log lines after `since`."""
        text = " ".join(self.native.last_error(comm).split())
        if self._log is None:
            return text, []
        return "" if self._log.is_noise(text) else text, self._log.lines(since)

    def trim_log(self) -> None:
        if self._log is not None:
            self._log.trim()

    def has(self, function: str) -> bool:
        """Returns whether the library has a function, named as in C without the prefix."""
        return function in self._present

    def require(self, function: str, purpose: str) -> None:
        """Raises `UnsupportedError` if the library lacks a function that `purpose` needs."""
        if not self.has(function):
            since = next(since for name, since, _ in self.native.functions() if name == function)
            raise UnsupportedError(
                f"{self.vendor.title} {version_text(self.version)} has no nccl{function}, "
                f"which {purpose} needs",
                hint=f"it came with NCCL {version_text(since)}: install a newer one",
            )

    def check(self, function: str, result: int, comm: int = 0, since: int = 0) -> None:
        """Raises the error of a failed call of `function`. Log lines before `since` are left out."""
        if result not in (SUCCESS, IN_PROGRESS):
            raise self.error(function, result, comm, since)

    def error(self, function: str, result: int, comm: int = 0, since: int = 0) -> CommError:
        text, lines = self.last_error(comm, since)
        return error_of(self.vendor.title, function, result, text or self.native.error_string(result), lines)

    def end(self, comm: int, device: torch.device, seconds: float) -> int:
        """Finalizes and destroys. Returns the result, or IN_PROGRESS if that takes more than `seconds`."""
        return int(self.native.end(comm, seconds, *self._current(device)))

    def abort(self, comm: int, device: torch.device, seconds: float) -> int:
        """Aborts. Returns the result, or IN_PROGRESS if that takes more than `seconds`; then it goes on."""
        return int(self.native.abort(comm, seconds, *self._current(device)))

    def revoke(self, comm: int, device: torch.device, seconds: float) -> int:
        """Ends what runs on `comm` and keeps it. Returns the result.

        After `seconds` the result is IN_PROGRESS, and `comm` is gone: it is aborted once it is revoked.
        """
        return int(self.native.revoke(comm, seconds, *self._current(device)))

    def _current(self, device: torch.device) -> tuple[int, int]:
        """Returns by what a thread of the native table makes `device` its current one."""
        try:
            return self._set_device(), device.index or 0
        except UnsupportedError:
            return 0, 0  # torch brings the runtime; without it the end is more important than the device

    def state_of(self, comm: int) -> int:
        """Returns the result code of the operations on `comm`: IN_PROGRESS while a call goes on by itself.

        The question also continues such a call. So two threads must not ask at the same time.
        """
        asked, state = self.native.async_error(comm)
        return int(asked if asked != SUCCESS else state)

    def await_state(self, comm: int, seconds: float) -> int:
        """Waits until no call on `comm` is in progress. Returns the result, IN_PROGRESS after `seconds`."""
        end = time.monotonic() + seconds
        while (result := self.state_of(comm)) == IN_PROGRESS and time.monotonic() < end:
            time.sleep(0.001)
        return result


def version_text(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


_opened: dict[str, Library] = {}
_lock = threading.Lock()


def open_library(vendor: NcclVendor) -> Library:
    """Returns the one copy that this process uses: the copy already loaded, else torch's, else the system's.

    Two copies in one process would both claim the GPU's connections. Raises `UnsupportedError`.
    """
    with _lock:
        if vendor.name not in _opened:
            _opened[vendor.name] = Library(vendor, vendor.find(_core.NcclLibrary))
        return _opened[vendor.name]


def not_in_time(library: Library, function: str, timeout: float, since: int) -> BackendError:
    """Returns the error of a creating call that did not return. All ranks have arrived before such a call.

    `since` is the log's position when the call began.
    """
    title = library.vendor.title
    _, lines = library.last_error(since=since)
    return BackendError(
        f"{title} {function} did not return within {timeout:g} s{log_text(title, lines)}",
        hint=known_cause("\n".join(lines))
        or "all ranks have arrived, so the library cannot connect them: NCCL_DEBUG=INFO shows its last step; "
        "NCCL_SOCKET_IFNAME chooses the network",
    )
