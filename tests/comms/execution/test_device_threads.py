"""Which device a thread has, that nobody has told: torch's own current one is each thread's."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from unicomm.comms.execution import one_sided
from unicomm.comms.execution.device import watchdog
from unicomm.comms.streams import TorchStreams, numbered


class Module:
    """As much of torch.cuda as is asked here; new threads have device 0."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.sets: list[int] = []

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self._local.device = device.index
        self.sets.append(device.index)

    @contextlib.contextmanager
    def device(self, index: int):
        before, self._local.device = self.current_device(), index
        try:
            yield
        finally:
            self._local.device = before


@pytest.fixture
def cuda(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_a_device_type_alone_is_the_current_device(cuda):
    cuda.set_device(torch.device("cuda", 3))
    assert numbered(torch.device("cuda")) == torch.device("cuda", 3)
    assert numbered(torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert numbered(torch.device("cpu")) == torch.device("cpu")


def test_the_watchdog_has_the_device_of_what_it_looks_at(cuda):
    seen: list[int] = []
    over = threading.Event()

    class Queue:
        busy = True

        def __init__(self, index: int) -> None:
            self.streams = TorchStreams(torch.device("cuda", index))
            self._index = index

        def look(self, now: float) -> None:
            if len(seen) >= 8:
                over.set()
                self.busy = False
            seen.append(self._index)
            seen.append(cuda.current_device())

    dog = watchdog._Watchdog()
    for index in (2, 0, 1):
        dog.watch(Queue(index))  # type: ignore[arg-type]
    assert over.wait(60)
    assert seen[::2] == seen[1::2]
    assert {2, 0, 1} <= set(seen)
    assert cuda.current_device() == 0  # of this thread


def test_the_watchdog_survives_a_device_that_does_not(caplog):
    looks: list[str] = []
    over = threading.Event()

    class Broken:
        busy = True
        streams = SimpleNamespace(adopt=lambda: 1 // 0)

        def look(self, now: float) -> None:
            looks.append("broken")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Whole(Broken):
        def look(self, now: float) -> None:
            looks.append("whole")
            if looks.count("whole") == 3:
                self.busy = broken.busy = False
                over.set()

    dog, broken = watchdog._Watchdog(), Broken()
    dog.watch(broken)  # type: ignore[arg-type]
    dog.watch(Whole())  # type: ignore[arg-type]
    assert over.wait(60)
    assert looks.count("broken") >= 2
    assert [record.message for record in caplog.records] == ["the watchdog could not look at operations"]


def test_symmetric_memory_is_used_on_its_device(cuda):
    """Its table's calls take a stream, of which each device has its own number 0."""
    executor = SimpleNamespace(streams=object())
    engine = SimpleNamespace(member=SimpleNamespace(device=torch.device("cuda", 5)), executor=executor)
    seen = []
    one_sided.attempt(engine, lambda limit: seen.append((cuda.current_device(), limit)), 7.0)
    assert seen == [(5, 7.0)]
    assert cuda.current_device() == 0
    executor.streams = None
    one_sided.attempt(engine, lambda limit: seen.append(cuda.current_device()), 7.0)
    assert seen[1] == 0
