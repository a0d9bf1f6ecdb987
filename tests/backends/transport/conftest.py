"""The engines that move messages."""

import pytest

from tests.ucx_here import needs_ucx


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=needs_ucx)])
def backend(request):
    """A backend over a transport."""
    return request.param
