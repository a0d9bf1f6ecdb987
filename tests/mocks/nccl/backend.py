"""unicomm's NCCL and RCCL backends over the mock of tests/mocks/nccl: host memory and host threads.

What torch does to a tensor happens at once here, not on a stream. So the parts of composed operations that
torch does (copies, folds) wait for the streams, before and after; operations of the library do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.mocks.nccl.build import LATEST, NoCompiler
from tests.mocks.nccl.build import library as build
from unicomm import _core, register_backend
from unicomm.backends.nccl.backend import NcclBackend
from unicomm.backends.nccl.library import NCCL, RCCL, Library, NcclVendor
from unicomm.backends.nccl.registered_memory import TensorMemory
from unicomm.comms.errors import BackendError
from unicomm.comms.execution.composed import completion
from unicomm.comms.streams import Streams

_current = threading.local()
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_called: list[Any] = []
_NOT_READY = 600


class HostStreams(Streams):
    """The mock's streams and events. The default stream is each thread's own."""

    frees_in_order = False

    def __init__(self, path: str) -> None:
        self._c = ctypes.CDLL(path)
        self._c.mock_event_elapsed_ms.argtypes = [
            ctypes.POINTER(ctypes.c_float),
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]

    def _done(self, result: int) -> None:
        assert result == 0, result

    def adopt(self) -> None:
        _current.adopted = True

    def current(self) -> int | None:
        return getattr(_current, "stream", None)

    def new(self) -> int:
        made = ctypes.c_void_p()
        self._done(self._c.mock_stream_create(ctypes.byref(made)))
        assert made.value is not None
        return made.value

    def handle(self, stream: int | None) -> int:
        return stream or 0

    @contextlib.contextmanager
    def use(self, stream: int | None) -> Any:
        before, _current.stream = self.current(), stream
        try:
            yield
        finally:
            _current.stream = before

    def record(self, stream: int | None) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._done(self._c.mock_event_create(ctypes.byref(event), 1))
        self._done(self._c.mock_event_record(event, ctypes.c_void_p(stream)))
        return event

    def wait(self, stream: int | None, event: ctypes.c_void_p) -> None:
        self._done(self._c.mock_stream_wait_event(ctypes.c_void_p(stream), event))

    def is_over(self, event: ctypes.c_void_p) -> bool:
        # On a GPU a thread of ours that asks without a device takes memory of another one.
        ours = threading.current_thread().name.startswith("unicomm-watchdog")
        assert not ours or getattr(_current, "adopted", False)
        result = self._c.mock_event_query(event)
        if result in (0, _NOT_READY):
            return bool(result == 0)
        raise RuntimeError(f"the device's error {result}")

    def elapsed(self, first: ctypes.c_void_p, second: ctypes.c_void_p) -> float:
        ms = ctypes.c_float()
        self._done(self._c.mock_event_elapsed_ms(ctypes.byref(ms), first, second))
        return ms.value / 1e3

    def is_capturing(self) -> bool:
        capturing = ctypes.c_int()
        self._done(self._c.mock_stream_is_capturing(ctypes.c_void_p(self.current()), ctypes.byref(capturing)))
        return bool(capturing.value)

    def synchronize(self) -> None:
        self._done(self._c.mock_stream_synchronize(ctypes.c_void_p(self.current())))

    def call(self, function: Callable[[], object]) -> None:
        """Has the current stream call it."""

        def run(_: object) -> None:
            function()

        kept = _CALLBACK(run)
        _called.append(kept)  # for as long as a stream may call it
        self._done(self._c.mock_stream_host_function(ctypes.c_void_p(self.current()), kept, None))

    def sleep(self, ms: float) -> None:
        """Keeps the current stream busy."""
        self._done(self._c.mock_stream_sleep(ctypes.c_void_p(self.current()), ctypes.c_double(ms)))


class HostMemory(TensorMemory):
    """The mock's memory, by the two functions that torch.cuda's pool would call."""

    pool = None

    def allocate(self, nbytes: int) -> torch.Tensor:
        allocate, free = self.library.native.allocator()
        size, device, stream = ctypes.c_ssize_t(nbytes), ctypes.c_int(0), ctypes.c_void_p()
        at = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(allocate)(
            size, device, stream
        )
        if not at:
            raise BackendError(f"no {nbytes} bytes", hint="free tensors")
        give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            free
        )
        array = (ctypes.c_uint8 * nbytes).from_address(at)
        weakref.finalize(array, give_back, at, size, device, stream)
        return torch.frombuffer(array, dtype=torch.uint8)


class AtOnce:
    """Of a backend over host memory: what torch does there at once, in composed operations, waits first."""

    capabilities: Any

    def collective(self, call: Any, run: Any) -> None:
        self._composing = not completion.is_native(self.capabilities, call)
        assert not (self._composing and self.streams().is_capturing()), "its torch parts run at once here"
        if self._composing:
            self.streams().synchronize()
        try:
            super().collective(call, run)  # type: ignore[misc]
        finally:
            self._composing = False

    def run(self, call: Any) -> None:
        super().run(call)  # type: ignore[misc]
        self._settle_part()

    def exchange(self, messages: Any, timeout: float) -> None:
        super().exchange(messages, timeout)  # type: ignore[misc]
        self._settle_part()

    def _settle_part(self) -> None:
        if self._composing:
            self.streams().synchronize()

    _composing = False


class MockBackend(AtOnce, NcclBackend):
    """A base: `make` gives a class of it for a library."""

    path: str
    opened: Library
    copies = "mock_memcpy_async"

    @classmethod
    def library(cls) -> Library:
        return cls.opened

    @classmethod
    def device_streams(cls, device: torch.device) -> HostStreams:
        return HostStreams(cls.path)

    @classmethod
    def device_memory(cls, library: Library, device: torch.device) -> TensorMemory:
        return HostMemory(library, device)

    @classmethod
    def device_copies(cls) -> tuple[int, int, int]:
        device = ctypes.CDLL(cls.path)
        copy, query, last_error = (
            ctypes.cast(device[name], ctypes.c_void_p).value or 0
            for name in (cls.copies, "mock_stream_query", "mock_last_error")
        )
        return copy, query, last_error

    @classmethod
    def fp8(cls, library: Library, device: torch.device) -> bool:
        return cls.vendor.fp8_since is not None and library.version >= cls.vendor.fp8_since


def opened(vendor: NcclVendor, path: str) -> Library:
    """The mock at that path, with its own devices."""
    set_device = ctypes.cast(ctypes.CDLL(path).mock_set_device, ctypes.c_void_p).value or 0
    return Library(vendor, _core.NcclLibrary(path), lambda: set_device)


def make(name: str, version: int = LATEST, rccl: bool = False) -> type[MockBackend]:
    """A backend over a mock of that version, registered under `name`; skips without a compiler."""
    try:
        path = str(build(version, rccl))
    except NoCompiler as error:
        pytest.skip(str(error))
    vendor = RCCL if rccl else NCCL
    made = type(
        "Mock",
        (MockBackend,),
        {
            "name": name,
            "vendor": vendor,
            "path": path,
            "opened": opened(vendor, path),
            "capabilities": replace(NcclBackend.capabilities, device_types=frozenset({"cpu"})),
        },
    )
    register_backend(name, made)
    return made
