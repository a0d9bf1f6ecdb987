"""What the tests of this folder run on: a GPU with the vendor's library, or the mock that stands for it.

The bodies are the same. With the mock they prove that the tests are right, and nothing about a GPU: what
torch does to a tensor happens there at once, not on a stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import unicomm
from tests.threads import results
from unicomm import Communicator
from unicomm.testing import run_ranks

_CYCLES_PER_MS = 1_500_000  # about; how long it is does not matter


class Kit:
    """What both have."""

    backend: str
    device: torch.device

    def new(self, **options: Any) -> Communicator:
        """A communicator of one rank."""
        return unicomm.new_comm(self.backend, self.device, rank=0, size=1, name="one", **options)

    def try_new(self, **options: Any) -> Communicator | unicomm.UnsupportedError:
        try:
            return self.new(**options)
        except unicomm.UnsupportedError as error:
            return error


class Gpu(Kit):
    """The first GPU of this machine, by torch.cuda; the others for several ranks."""

    name = "gpu"
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no GPU that torch can use here")
        self.backend = "nccl" if torch.version.hip is None else "rccl"

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def occupy(self, ms: int) -> None:
        """Keeps the current stream busy."""
        torch.cuda._sleep(ms * _CYCLES_PER_MS)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream."""
        to.copy_(source)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph)

    def ranks(self, n: int, program: Callable[[Communicator], Any]) -> list[Any]:
        """`program` on that many GPUs, one rank each, as threads."""
        if torch.cuda.device_count() < n:
            pytest.skip(f"{torch.cuda.device_count()} GPUs are fewer than {n}")
        store = HashStore()

        def run(rank: int) -> Any:
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
            with unicomm.new_comm(
                self.backend, device, rank=rank, size=n, store=store, name="several", timeout=60
            ) as comm:
                return program(comm)

        return results([partial(run, rank) for rank in range(n)], within=100)

    def symmetric(self, n: int, program: Callable[[Communicator], Any]) -> list[Any]:
        """The same with what symmetric memory needs besides."""
        pytest.importorskip("cupy", reason="symmetric memory on devices needs cupy: unicomm[device]")
        return self.ranks(n, program)


class Mock(Kit):
    """tests/mocks/nccl, as the newest NCCL that it plays."""

    name = "mock"
    backend = "nccl-new"
    device = torch.device("cpu")

    def __init__(self) -> None:
        from tests.mocks.nccl import kinds

        self._streams = kinds.of(self.backend).device_streams(self.device)

    def new_stream(self) -> Any:
        return self._streams.new()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return self._streams.use(stream)

    def occupy(self, ms: int) -> None:
        self._streams.sleep(ms)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        places = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        stream = ctypes.c_void_p(self._streams.current())
        assert self._streams._c.mock_stream_memcpy(stream, *places, ctypes.c_size_t(to.nbytes)) == 0

    def synchronize(self) -> None:
        self._streams.synchronize()

    def graph(self) -> Any:
        from tests.mocks.nccl.graphs import HostGraph

        return HostGraph(self._streams)

    def capture(self, graph: Any) -> AbstractContextManager[Any]:
        captured: AbstractContextManager[Any] = graph.capture()
        return captured

    def ranks(self, n: int, program: Callable[[Communicator], Any]) -> list[Any]:
        return run_ranks(program, n, backend=self.backend)

    def symmetric(self, n: int, program: Callable[[Communicator], Any]) -> list[Any]:
        if n > 1:
            pytest.skip("tests/symm/device has it")
        from tests.mocks.device import backend as device_mock

        return run_ranks(program, n, backend=device_mock.make("symm-gpu-kit").name)


KITS = {"gpu": Gpu, "mock": Mock}
