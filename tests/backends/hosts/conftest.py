"""What carries messages between the hosts of a test."""

import pytest

from .between import use


@pytest.fixture(params=["tcp", "gloo"])
def between(request, monkeypatch):
    """Has `auto` in this process use TCP, or Gloo in its place."""
    use(request.param, monkeypatch)
    return request.param
