"""What carries messages between the hosts of a test."""

import pytest

from .between import use


@pytest.fixture(params=["ucx", "gloo"])
def between(request, monkeypatch):
    """Has `auto` in this process use UCX, or Gloo as where there is no UCX."""
    use(request.param, monkeypatch)
    return request.param
