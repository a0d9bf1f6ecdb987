"""frames_of_threads: where each thread of this process is."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.RLock()  # a signal handler may ask while it has interrupted the question


def frames_of_threads() -> dict[int, FrameType]:
    """Returns the present frame of each thread, by its identifier.

    `sys._current_frames` makes objects while it holds a lock of the interpreter. If that starts a garbage
    collection, whose finalizers let another thread run, and that thread ends, both wait for ever, and all
    others for the GIL (CPython's gh-106883). So nothing is collected meanwhile.
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
