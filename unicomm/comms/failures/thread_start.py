"""Starts of threads that end in an error where there is no memory left.

`Thread.start` waits for ever for a thread that finds no memory for its first steps (CPython issue 140746).
"""

from __future__ import annotations

import mmap
import threading

_ROOM = 4 << 20  # bytes that a new thread needs at most, besides its stack, until its own code runs


def start(thread: threading.Thread) -> None:
    """Starts the thread. Raises `OSError` without memory, and `RuntimeError` if the system has no thread."""
    started(thread)


def started(thread: threading.Thread) -> threading.Thread:
    """The same, for an attribute that says whether there is a thread: it is not set if none starts."""
    mmap.mmap(-1, _ROOM).close()
    thread.start()
    return thread
