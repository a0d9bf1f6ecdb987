"""The engines that move messages."""

import pytest

from unicomm.backends.ucx.library import why_not

_UCX = pytest.mark.skipif(bool(why_not()), reason=f"no UCX: {why_not()}")


@pytest.fixture(params=["tcp", pytest.param("ucx", marks=_UCX)])
def backend(request):
    """A backend over a transport."""
    return request.param
