"""The double, loaded through ctypes, and ranks of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mocks.nccl.api import Double, in_threads


@pytest.fixture(scope="session")
def played(nccl_double) -> Callable[..., Double]:
    """`played(22105, rccl=False)`: the double of that version."""
    return lambda *version, **kind: Double(nccl_double(*version, **kind))


@pytest.fixture(scope="session")
def double(played) -> Double:
    return played()


@pytest.fixture
def group(double):
    """`group(n, body)`: `body(rank, comm, stream)` in n ranks of a new communicator; their results."""

    def start(n, body, config=None, destroy=True):
        uid = double.unique_id()

        def run(rank):
            comm, stream = double.init(n, uid, rank, config), double.stream()
            result = body(rank, comm, stream)
            if destroy:
                double.synchronize(stream)
                double.call("ncclCommDestroy", comm)
            double.call("double_stream_destroy", stream)
            return result

        return in_threads(n, run)

    return start
