"""The thread that looks after all communicators' operations on devices; there is one while there are any."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .queue import StreamQueue

LOOK = 0.001  # seconds between two looks while something new runs, growing ...
LONGEST_LOOK = 0.02  # ... up to this
_LOOKS_WITHOUT = 500  # looks without anything to watch until the thread ends


class _Watchdog:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[StreamQueue] = []
        self._fresh = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: weakref.WeakSet[StreamQueue] = weakref.WeakSet()

    def watch(self, queue: StreamQueue) -> None:
        with self._lock:
            if queue not in self._queues:
                self._queues.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="unicomm-watchdog", daemon=True)
                self._thread.start()
            if not self._fresh.is_set():  # to look costs a tenth
                self._fresh.set()

    def _loop(self) -> None:
        nap, idle = LOOK, 0
        while True:
            if self._fresh.is_set():
                self._fresh.clear()
                nap = LOOK
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_LOOK)
            now = time.monotonic()
            for queue in list(self._queues):
                with contextlib.suppress(Exception):  # of a broken device: its own look hears of it, too
                    queue.streams.adopt()
                try:
                    queue.look(now)
                except Exception:  # the other communicators are looked after all the same
                    if queue not in self._failed:
                        self._failed.add(queue)
                        logging.getLogger("unicomm").exception("the watchdog could not look at operations")
            with self._lock:
                self._queues = [queue for queue in self._queues if queue.busy]
                idle = 0 if self._queues else idle + 1
                if idle > _LOOKS_WITHOUT:
                    self._thread = None
                    return


_watchdog = _Watchdog()


def watch(queue: StreamQueue) -> None:
    """Looks after a communicator's operations until there are none."""
    _watchdog.watch(queue)


def forget_after_fork() -> None:
    """In a forked child, which has no such thread."""
    global _watchdog
    _watchdog = _Watchdog()
