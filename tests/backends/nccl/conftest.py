"""What tests over the double of NCCL share."""

import pytest

from tests.mocks.nccl.kinds import of


@pytest.fixture
def double(fresh_recorder) -> str:
    """The name of the newest double's backend, whose ranks have a ring of the test's own."""
    of("nccl-new")
    return "nccl-new"
