"""Threads for what may block: as many as have to at the same time, used again for what comes soon after."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable

_IDLE = 0.5  # seconds without a job after which a thread ends


class Threads:
    """Runs each job in a thread of its own. Daemons: what blocks forever must not keep the process."""

    def __init__(self, name: str, awaited: bool = False) -> None:
        """`awaited`: the process's end waits a little for the jobs: `finish`."""
        self._name = name
        self._start_anew()
        if awaited:
            _awaited.append(self)

    def _start_anew(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = self._running = 0
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        self._pid = os.getpid()

    def run(self, job: Callable[[], None]) -> None:
        """Returns at once. What the job raises is logged."""
        if os.getpid() != self._pid:  # a forked child has none of the threads
            self._start_anew()
        with self._lock:
            self._running += 1
            start = self._free == 0
            if not start:
                self._free -= 1
        if start:
            threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:  # somebody counts on this one
                        continue
                    self._free -= 1
                    return
            try:
                job()
            except Exception:
                logging.getLogger("unicomm").exception("in thread %s", self._name)
            del job  # and what it holds
            with self._lock:
                self._free += 1
                self._running -= 1
                self._over.notify_all()

    def _finish(self, seconds: float) -> None:
        if os.getpid() != self._pid:
            return
        with self._over:
            self._over.wait_for(lambda: self._running == 0, seconds)


_awaited: list[Threads] = []


def finish(seconds: float) -> None:
    """Waits that long at most for what is under way. Called when the process ends.

    A thread that is in C++ then, as in a store, and comes back to an interpreter that is gone ends the
    process by SIGABRT; and others wait for what it has to say.
    """
    end = time.monotonic() + seconds
    for threads in _awaited:
        threads._finish(max(0.0, end - time.monotonic()))
