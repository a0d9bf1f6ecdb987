"""The watchdog: one thread per process that looks after the operations of all communicators on devices."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import Protocol

from unicomm.comms.failures.thread_start import start
from unicomm.comms.streams import Streams

LOOK = 0.001  # seconds between two looks while new operations run, growing ...
LONGEST_LOOK = 0.02  # ... up to this
_LOOKS_WITHOUT = 500  # looks without anything to watch until the thread ends


class Watched(Protocol):
    """The stream executor of a communicator, as the watchdog sees it."""

    streams: Streams

    @property
    def busy(self) -> bool: ...

    def look(self, now: float) -> None: ...


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executors: list[Watched] = []
        self._fresh = False  # whether operations were issued since the last look
        self._thread: threading.Thread | None = None
        self._failed: weakref.WeakSet[Watched] = weakref.WeakSet()

    def watch(self, executor: Watched) -> None:
        with self._lock:
            if executor not in self._executors:
                self._executors.append(executor)
            if self._thread is None:
                name = "unicomm-watchdog"
                self._thread = start(threading.Thread(target=self._loop, name=name, daemon=True))
            self._fresh = True

    def _loop(self) -> None:
        nap, idle = LOOK, 0
        while True:
            if self._fresh:
                self._fresh, nap = False, LOOK
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_LOOK)
            now = time.monotonic()
            for executor in list(self._executors):
                with contextlib.suppress(Exception):  # of a broken device, which `look` will meet as well
                    executor.streams.adopt()
                try:
                    executor.look(now)
                except Exception:  # the other communicators must be looked after all the same
                    if executor not in self._failed:
                        self._failed.add(executor)
                        logging.getLogger("unicomm").exception("the watchdog could not look at operations")
            with self._lock:
                self._executors = [executor for executor in self._executors if executor.busy]
                idle = 0 if self._executors else idle + 1
                if idle > _LOOKS_WITHOUT:
                    self._thread = None
                    return


_watchdog = _Watchdog()


def watch(executor: Watched) -> None:
    """Looks after a communicator's operations until none is pending."""
    _watchdog.watch(executor)


def forget_after_fork() -> None:
    """Starts anew in a forked child, which has no such thread."""
    global _watchdog
    _watchdog = _Watchdog()
