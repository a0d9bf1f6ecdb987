"""The mock as a device whose current stream is the host: torch's CPU tensors can then be what it works on.

What `wait` leaves to the device with a GPU, it does here before it returns; all else is as with streams:
asynchronous operations are on a stream of their own, and the watchdog sees them end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from tests.mocks.nccl.backend import HostStreams, MockBackend, make
from unicomm import register_backend
from unicomm.comms.backend import Prepare


class HostIsStream(HostStreams):
    def wait(self, stream: int | None, event: ctypes.c_void_p) -> None:
        if stream is None:
            self._done(self._c.mock_event_synchronize(event))
        else:
            super().wait(stream, event)


class HostDevice(MockBackend):
    copies = "mock_memcpy_at_once"

    @classmethod
    def device_streams(cls, device: torch.device) -> HostStreams:
        return HostIsStream(cls.path)

    def collective(self, call: Any, run: Any) -> None:
        super().collective(call, run)
        self._arrive()

    def direct(self, name: str) -> Prepare | None:
        prepare = super().direct(name)
        if prepare is None:
            return None

        def prepare_here(*arguments: Any) -> Callable[[], None] | None:
            put = prepare(*arguments)
            if put is None:
                return None

            def put_and_arrive() -> None:
                put()
                self._arrive()

            return put_and_arrive

        return prepare_here

    def exchange(self, messages: Any, timeout: float) -> None:
        super().exchange(messages, timeout)
        self._arrive()

    def _arrive(self) -> None:
        if self.streams().current() is None:  # no stream of the device's: what comes next is the host's
            self.streams().synchronize()


def make_host_device(name: str) -> type[HostDevice]:
    """That backend, registered under `name`."""
    mock = make(f"{name}-base")
    made = type("HostDevice", (HostDevice,), dict(vars(mock)) | {"name": name})
    register_backend(name, made)
    return made
