"""The streams of torch's devices (CUDA, and HIP under the same name), and which device a type alone means."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from unicomm.comms.backend import Backend, Streams, UsesStreams

from .device import graphs


def numbered(device: torch.device) -> torch.device:
    """The device that is meant by its type alone: the current one, which is another one in other threads."""
    if str(device) != device.type or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within, what a library does in this thread is on that device, which may be the CPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).device(numbered(device).index)  # type: ignore[no-any-return]


def device_streams(backend: type[Backend], device: torch.device) -> Streams | None:
    """Returns the streams on which a backend's operations run on that device, if any."""
    return backend.device_streams(device) if issubclass(backend, UsesStreams) else None


class TorchStreams(Streams):
    """The streams of a torch device, by the module that torch has for it (`torch.cuda` for both)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._there = bool(self._module.is_available())  # torch may be built for none
        for graph_class in (
            getattr(self._module, "CUDAGraph", None),
            getattr(torch.accelerator, "Graph", None),
        ):
            if graph_class is not None:
                graphs.follow(graph_class)

    def adopt(self) -> None:
        if self._module.current_device() != self._device.index:
            self._module.set_device(self._device)

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def new(self) -> Any:
        return self._module.Stream(self._device)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        found: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return found

    def record(self, stream: Any) -> Any:
        # Those of a graph cannot be asked for times.
        event = self._module.Event(enable_timing=not self.is_capturing())
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def is_over(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def future(self) -> torch.futures.Future[Any] | None:
        return torch.futures.Future(devices=[self._device])

    def is_capturing(self) -> bool:
        return self._there and bool(self._module.is_current_stream_capturing())
