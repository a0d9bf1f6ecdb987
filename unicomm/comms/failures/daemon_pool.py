"""DaemonPool: threads for calls that may never return, such as a request to a store whose host is gone.

`concurrent.futures` does not serve here: its threads keep the process from ending; their number is bounded,
so that calls that hang keep others from starting; and it does not work in a forked child.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .thread_start import start

T = TypeVar("T")

_IDLE = 0.5  # seconds without a job after which a thread ends


class DaemonPool:
    """Runs each job at once, in an idle thread of the pool or a new one. All threads are daemons."""

    def __init__(self, name: str, awaited: bool = False) -> None:
        """`awaited`: when the process ends, `finish` waits a little for the jobs."""
        self._name = name
        self._start_anew()
        if awaited:
            _awaited.append(self)

    def _start_anew(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._free = self._running = 0
        self._lock = threading.Lock()
        self._over = threading.Condition(self._lock)
        self._pid = os.getpid()

    def run(self, job: Callable[[], object]) -> None:
        """Starts the job and returns. An exception of the job is logged.

        Raises `OSError` or `RuntimeError` if a thread is needed and there is no memory for it.
        """
        if os.getpid() != self._pid:  # a forked child has none of the threads
            self._start_anew()
        with self._lock:
            self._running += 1
            new = self._free == 0
            if not new:
                self._free -= 1
        if new:
            try:
                start(threading.Thread(target=self._loop, name=self._name, daemon=True))
            except BaseException:
                with self._lock:
                    self._running -= 1
                raise
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:  # `run` has counted on this thread
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


def call_within(seconds: float, name: str, job: Callable[[], T]) -> T:
    """Returns or raises what `job` does, in a thread of its own; `TimeoutError` if that takes too long."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(job())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    start(thread)
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]


_awaited: list[DaemonPool] = []


def finish(seconds: float) -> None:
    """Waits at most `seconds` for the jobs of all awaited pools. Called when the process ends.

    Other ranks wait for what these jobs publish. And a thread that is in C++ at that time, as in a store,
    ends the process by SIGABRT when it returns to an interpreter that is gone.
    """
    end = time.monotonic() + seconds
    for pool in _awaited:
        pool._finish(max(0.0, end - time.monotonic()))
