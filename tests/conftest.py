"""Fixtures of all tests."""

from __future__ import annotations

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
