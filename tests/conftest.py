"""Fixtures of all tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def raised() -> Callable[..., BaseException]:
    """`raised(f, *args, **kwargs)`: the exception that a call raises; fails when it raises none.

    For ranks that go on after their error and return it, to be looked at by the test.
    """

    def catch(f: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
        try:
            result = f(*args, **kwargs)
        except BaseException as error:
            return error
        raise AssertionError(f"nothing was raised; the call returned {result!r}")

    return catch


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """`eventually(condition)` returns when `condition()` is true; fails when it is not within 20 seconds."""

    def until(condition: Callable[[], object], within: float = 20.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"not within {within} s"
            time.sleep(0.0005)

    return until
