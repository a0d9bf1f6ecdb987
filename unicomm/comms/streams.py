"""Streams and events of a device: what operations that run on a device need of its runtime.

`Streams` is the interface that a backend for devices provides; `TorchStreams` implements it for a torch
device (`torch.cuda`, which serves NVIDIA's and AMD's GPUs). The mock libraries of the tests implement it by
host threads.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

_NO_CHANGE = contextlib.nullcontext()


def numbered(device: torch.device) -> torch.device:
    """The device with its index. A device given by its type alone is the calling thread's current one."""
    if str(device) != device.type or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` this thread's current device within the block.

    Does nothing for the CPU and for the device that is the current one already.
    """
    return device_guard(device)()


def device_guard(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Returns `on_device` of one device, as a function that looks up nothing of it again."""
    if device.type == "cpu":
        return lambda: _NO_CHANGE
    module, index = torch.get_device_module(device), device.index

    def guard() -> contextlib.AbstractContextManager[Any]:
        if index is None or module.current_device() == index:
            return _NO_CHANGE
        return module.device(index)  # type: ignore[no-any-return]

    return guard


class Streams(abc.ABC):
    """Streams and events of one device.

    Stream and event objects are opaque. Two stream objects that compare equal are the same stream: torch
    makes a new object at each request.

    Attributes:
        frees_in_order: whether memory that is freed while the current stream uses it is reused by later work
            of that stream only, as torch's allocator guarantees.
        count_graphs: counts the graphs of `graphs_alive`; set by the executor that follows graphs.
    """

    frees_in_order = True
    count_graphs: Callable[[Streams], int] | None = None

    def adopt(self) -> None:  # noqa: B027
        """Makes this device the current one of the calling thread, which belongs to unicomm.

        Called before the thread queries events: a query from a thread with another current device would
        create a context there, which takes memory.
        """

    def graph_classes(self) -> Sequence[type]:
        """The classes of graphs that can capture these streams (see execution/device/graphs.py)."""
        return ()

    def graphs_alive(self) -> int:
        """The number of graphs that hold operations captured on these streams."""
        return 0 if self.count_graphs is None else self.count_graphs(self)

    @abc.abstractmethod
    def current(self) -> Any:
        """The calling thread's current stream."""

    @abc.abstractmethod
    def new(self) -> Any:
        """A new stream."""

    @abc.abstractmethod
    def handle(self, stream: Any) -> int:
        """The stream's handle as the vendor's libraries take it."""

    @abc.abstractmethod
    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Makes `stream` the current one within the block."""

    @abc.abstractmethod
    def record(self, stream: Any) -> Any:
        """An event behind all work that `stream` has so far."""

    @abc.abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Makes later work of `stream` run after `event`. Does not block the host."""

    @abc.abstractmethod
    def is_over(self, event: Any) -> bool:
        """Whether `event` has happened. Raises when the device has failed."""

    @abc.abstractmethod
    def elapsed(self, first: Any, second: Any) -> float:
        """Seconds of device time between two events that are over."""

    def future(self) -> torch.futures.Future[Any] | None:
        """An empty future whose `wait()` makes the waiting thread's stream wait for the current one.

        None where torch's futures know no such device: the result is then set once it is complete.
        """
        return None

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether a graph captures the current stream. A captured stream runs nothing."""


class TorchStreams(Streams):
    """The streams of a torch device, through torch's module for that device type."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._there = bool(self._module.is_available())  # torch may be built for none

    def graph_classes(self) -> Sequence[type]:
        found = (getattr(self._module, "CUDAGraph", None), getattr(torch.accelerator, "Graph", None))
        return [graph_class for graph_class in found if graph_class is not None]

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
        # A captured event has no time.
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
