"""The mock, loaded through ctypes, and ranks of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mocks.nccl.api import Mock, in_threads


@pytest.fixture(scope="session")
def played(mock_nccl_library) -> Callable[..., Mock]:
    """`played(22105, rccl=False)`: the mock of that version."""
    return lambda *version, **kind: Mock(mock_nccl_library(*version, **kind))


@pytest.fixture(scope="session")
def mock(played) -> Mock:
    return played()


@pytest.fixture
def group(mock):
    """`group(n, body)`: `body(rank, comm, stream)` in n ranks of a new communicator; their results."""

    def start(n, body, config=None, destroy=True):
        uid = mock.unique_id()

        def run(rank):
            comm, stream = mock.init(n, uid, rank, config), mock.stream()
            result = body(rank, comm, stream)
            if destroy:
                mock.synchronize(stream)
                mock.call("ncclCommDestroy", comm)
            mock.call("mock_stream_destroy", stream)
            return result

        return in_threads(n, run)

    return start
