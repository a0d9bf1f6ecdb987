"""Starts of threads that end in an error where there is no memory left.

`Thread.start` waits for ever for a thread that finds no memory for its first steps (CPython issue 140746).
"""

from __future__ import annotations

import mmap
import threading

_ROOM = 4 << 20  # bytes that a new thread needs at most, besides its stack, until its own code runs


def start(thread: threading.Thread) -> threading.Thread:
    """Starts the thread and returns it, so that an attribute only names a thread that has started.

    Raises `OSError` without memory, and `RuntimeError` if the system has no thread.
    """
    mmap.mmap(-1, _ROOM).close()
    thread.start()
    return thread
