"""Waiting for what a test cannot be told of."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], within: float = 20.0) -> None:
    """Returns when `condition()` is true; fails when it is not within so many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.0005)
