"""Worker: the thread that runs a communicator's asynchronous operations on the host, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from unicomm.comms.errors import CommError
from unicomm.comms.failures.thread_start import start
from unicomm.comms.work import Work

_PARTS = 10


def wait_awake(wait: Callable[[float], bool], seconds: float) -> bool:
    """Waits for other threads of this process; returns False when they take longer than `seconds`.

    They do not run while the process is stopped, yet the clock goes on. So `wait` is called with parts of the
    time until it returns True: a stop, however long, costs one part.
    """
    return any(wait(seconds / _PARTS) for _ in range(_PARTS))


class Worker:
    """Runs jobs one after the other in a thread of its own, which is started by the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.thread = 0  # its identifier while it runs, as `threading.get_ident` returns it
        self.driving: set[int] = set()  # the threads that move queued messages now
        self._waiting: list[Work] = []  # in order; the first one may be running

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def is_current(self) -> bool:
        """Whether the caller runs in the worker's thread: in a callback, that is."""
        return threading.get_ident() == self.thread

    def amid(self) -> str:
        """What the caller's thread has to run first, in a callback or a signal handler; "" if nothing."""
        here = threading.get_ident()
        if here == self.thread:
            return "the operations of the communicator"
        return "its messages" if here in self.driving else ""

    def pending(self) -> list[Work]:
        return list(self._waiting)

    def submit(self, work: Work, job: Callable[[], None]) -> None:
        """`job` is called later in order; what it raises becomes the work's error."""
        if self._thread is None:
            # A daemon: a rank that waits for a lost peer must not keep the process from ending. The
            # exit handler in membership/finalize.py drains it first.
            self._thread = start(threading.Thread(target=self._loop, name=self._name, daemon=True))
        work._worker = self
        self._waiting.append(work)
        self._jobs.put((work, job))

    def drain(self, timeout: float) -> bool:
        """Waits until all jobs are done; False when they are not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for work in self.pending():
            lock = work._lock
            if lock is None or not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
            lock.release()
        return True

    def close(self, timeout: float) -> bool:
        """Ends the thread after the jobs it has; False when it does not end within `timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.put(None)
        if thread is threading.current_thread():
            return True

        def joined(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        return wait_awake(joined, timeout)

    def forget(self) -> None:
        """In a forked child, which has no such thread: what was pending ends with an error."""
        for work in self.pending():
            work._forget()
        self._waiting.clear()
        self._thread = None

    def _loop(self) -> None:
        self.thread = threading.get_ident()
        while (item := self._jobs.get()) is not None:
            work, job = item
            error: BaseException | None = None
            work._start()
            try:
                job()
            except BaseException as caught:
                error = caught
                if not isinstance(error, CommError) and hasattr(error, "add_note"):  # since Python 3.11
                    error.add_note(f"raised by asynchronous {work.name} #{work.seq}")
            del job, item  # tensors are released as soon as the operation is over
            self._waiting.pop(0)
            work._finish(error)
            del work, error  # nor may what an error's traceback holds be kept until the next operation
        self.thread = 0
