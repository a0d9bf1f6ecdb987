"""What carries messages between the hosts of a test."""

import pytest

from unicomm.backends import auto
from unicomm.backends.ucx.library import why_not


@pytest.fixture(params=["ucx", "gloo"])
def between(request, monkeypatch):
    """Has `auto` in this process use UCX, or Gloo as where there is no UCX."""
    if request.param == "gloo":
        monkeypatch.setattr(auto, "why_not", lambda path: "this test does without")
    elif reason := why_not():
        pytest.skip(f"no UCX: {reason}")
    return request.param
