"""Fixtures of the profiler's tests."""

import pytest

from unicomm.flight_recorder import writer


@pytest.fixture(autouse=True)
def fresh_recorder(monkeypatch):
    """A ring of the test's own: that of a test worker has seen more communicators than it can name."""
    monkeypatch.setattr(writer, "_recorder", None)
    yield
    if writer._recorder is not None:
        writer._recorder.close(True)
