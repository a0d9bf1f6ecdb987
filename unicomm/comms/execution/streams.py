"""Streams: where a device's operations run in order, and the events that say how far it has come.

`Streams` is as much of a device's runtime as operations need; `TorchStreams` is that of a torch device
(CUDA, and HIP under the same name). Tests have one of host threads.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any

import torch

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


class Streams(abc.ABC):
    """Streams and events of one device. Their objects are opaque here; equal ones are the same
    stream, which torch gives another object each time.

    Attributes:
        frees_in_order: memory that is freed while the current stream uses it is given to later work of that
            stream only, as torch's allocator does.
    """

    frees_in_order = True

    def adopt(self) -> None:  # noqa: B027
        """Makes their device that of a thread of ours, before it asks for events: a question of a thread
        whose device is another one would take memory there, for a context."""

    @abc.abstractmethod
    def current(self) -> Any:
        """The stream on which the caller's thread puts its work."""

    @abc.abstractmethod
    def new(self) -> Any:
        """A stream beside the current one."""

    @abc.abstractmethod
    def handle(self, stream: Any) -> int:
        """The library's own pointer to it."""

    @abc.abstractmethod
    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Within, it is the current one."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """An event after all that the stream has so far."""

    @abc.abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """What the stream gets from now on runs after the event. The host does not wait."""

    @abc.abstractmethod
    def is_over(self, event: Any) -> bool:
        """Whether it has happened; raises where the device has failed."""

    @abc.abstractmethod
    def elapsed(self, first: Any, second: Any) -> float:
        """Seconds of the device between two events that are over."""

    def future(self) -> torch.futures.Future[Any] | None:
        """An empty future: its result belongs to the current stream, and who waits for it makes that
        thread's stream wait. None where futures cannot: the result is then set when it is there."""
        return None

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether a graph captures the current stream, which runs nothing then."""


class TorchStreams(Streams):
    """Those of a torch device, by the module that torch has for it (`torch.cuda` for NVIDIA's and AMD's)."""

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
