"""Calls that tests make at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


def outcomes(calls: Sequence[Callable[[], Any]], within: float = 60.0) -> list[Any]:
    """What each call returned, or the exception that it raised."""
    return [value if error is None else error for value, error in _together(calls, within)]


def results(calls: Sequence[Callable[[], Any]], within: float = 60.0) -> list[Any]:
    """What each call returned; raises the exception of the first call that raised one."""
    found = _together(calls, within)
    for _, error in found:
        if error is not None:
            raise error
    return [value for value, _ in found]


def _together(calls: Sequence[Callable[[], Any]], within: float) -> list[tuple[Any, BaseException | None]]:
    found: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls)) if calls else None

    def run(i: int) -> None:
        try:
            assert start is not None
            start.wait()
            found[i] = calls[i](), None
        except BaseException as error:
            found[i] = None, error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within)
    hanging = [i for i, thread in enumerate(threads) if thread.is_alive()]
    if hanging:
        cause = next((outcome[1] for outcome in found if outcome is not None and outcome[1]), None)
        raise AssertionError(f"calls {hanging} of {len(calls)} have not returned") from cause
    return found
