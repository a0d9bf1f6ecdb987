"""Fixtures of the profiler's tests."""

import pytest


@pytest.fixture(autouse=True)
def always_fresh(fresh_recorder):
    pass
