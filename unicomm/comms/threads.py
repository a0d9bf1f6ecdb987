"""Threads for what may block: as many as have to at the same time, used again for what comes soon after."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

_IDLE = 0.5  # seconds without a job after which a thread ends


class Threads:
    """Runs each job in a thread of its own. Daemons: what blocks forever must not keep the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_anew()

    def _start_anew(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def run(self, job: Callable[[], None]) -> None:
        """Returns at once. What the job raises is logged."""
        if os.getpid() != self._pid:  # a forked child has none of the threads
            self._start_anew()
        with self._lock:
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
