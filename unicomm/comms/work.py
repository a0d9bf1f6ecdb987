"""Work: the handle of an operation; Worker: the thread that runs asynchronous operations in order."""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from .errors import CommError, CommTimeoutError, NotReadyError
from .options import seconds


class WorkStatus(enum.Enum):
    NOT_STARTED = "not started"
    INPROGRESS = "in progress"
    COMPLETED = "completed"
    ERROR = "error"
    TIMEDOUT = "timed out"


class Work:
    """The handle of an operation. A synchronous operation's has completed.

    Tensors of an asynchronous operation must not be touched until `wait()` has returned. Dropping a Work
    neither blocks nor loses the operation; its tensors are kept alive until it has run.
    """

    #: The other rank of a message, once it is over; -1 where there is none.
    peer: int = -1
    # What one that has completed has, which is made in every synchronous call: nothing of its own.
    _error: BaseException | None = None
    _pending = False
    _started = True
    _lock: threading.Lock | None = None
    _worker: Worker | None = None
    _callbacks: list[Callable[[Work], None]] | None = None

    def __init__(self, name: str, seq: int, pending: bool) -> None:
        self.name = name
        self.seq = seq
        if pending:
            self._pending = True
            self._started = False
            self._callbacks = []
            self._lock = threading.Lock()
            self._lock.acquire()

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Returns when the result may be used: CPU tensors are written; a device's stream waits.

        Raises the operation's error, each time it is called. With `timeout` (seconds) raises
        `CommTimeoutError` when that passes first; the operation goes on and can be waited for again.
        """
        if self._pending and self._lock is not None:
            limit = seconds(timeout, -1.0)
            if self._worker is not None and self._worker.is_current():
                raise NotReadyError(
                    "cannot wait here for an operation that this very thread has to run first",
                    op=self.name,
                    seq=self.seq,
                    hint="add another callback instead of waiting in one",
                )
            if not self._lock.acquire(timeout=limit):
                raise CommTimeoutError(
                    f"not finished within {limit:g} s of waiting; it goes on",
                    op=self.name,
                    seq=self.seq,
                    hint="wait again, or look at the recorder (unicomm trace show) for who is missing",
                )
            self._lock.release()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def wait_blocking(self, timeout: timedelta | float | None = None) -> None:
        """Like `wait`, but blocks the host until the operation has completed on any kind of device."""
        self.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the operation is over, well or with an error. Never blocks, never raises."""
        return not self._pending

    @property
    def status(self) -> WorkStatus:
        if self._pending:
            return WorkStatus.INPROGRESS if self._started else WorkStatus.NOT_STARTED
        if self._error is None:
            return WorkStatus.COMPLETED
        return WorkStatus.TIMEDOUT if isinstance(self._error, CommTimeoutError) else WorkStatus.ERROR

    def exception(self) -> BaseException | None:
        """The operation's error once it is over, or None. Does not wait."""
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(work)` once it is over: now if it is, else in the thread that runs it.

        That thread runs the communicator's next operations: a callback must not wait for them. What a
        callback raises is logged and changes nothing.
        """
        if self._callbacks is None:
            self._call(callback)
            return
        self._callbacks.append(callback)
        if not self._pending:
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread was faster
                return
            self._call(callback)

    def _call(self, callback: Callable[[Work], None]) -> None:
        try:
            callback(self)
        except Exception:  # it must not end the thread that has to run the operations after this one
            logging.getLogger("unicomm").exception("a callback of %r failed", self)

    def _start(self) -> None:
        self._started = True

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._pending = False
        if self._lock is not None:
            self._lock.release()
        self._run_callbacks()

    def _forget(self) -> None:
        """In a forked child, where it will never end."""
        self._error = NotReadyError(
            "pending in the process that this one was forked from",
            op=self.name,
            seq=self.seq,
            hint="wait for it there",
        )
        self._pending = False

    def __repr__(self) -> str:
        return f"<Work {self.name} #{self.seq}: {self.status.value}>"


class Worker:
    """Runs jobs one after the other in a thread of its own, which is started by the first job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Work, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ident = 0
        self._waiting: list[Work] = []  # in order; the first one may be running

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def is_current(self) -> bool:
        """Whether the caller runs in the worker's thread: in a callback, that is."""
        return threading.get_ident() == self._ident

    def pending(self) -> list[Work]:
        return list(self._waiting)

    def submit(self, work: Work, job: Callable[[], None]) -> None:
        """`job` is called later in order; what it raises becomes the work's error."""
        work._worker = self
        self._waiting.append(work)
        self._jobs.put((work, job))
        if self._thread is None:
            # A daemon: a rank that waits for a lost peer must not keep the process from ending. The
            # exit handler in lifecycle.py drains it first.
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

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
        thread.join(timeout)
        return not thread.is_alive()

    def forget(self) -> None:
        """In a forked child, which has no such thread: what was pending ends with an error."""
        for work in self.pending():
            work._forget()
        self._waiting.clear()
        self._thread = None

    def _loop(self) -> None:
        self._ident = threading.get_ident()
        while (item := self._jobs.get()) is not None:
            work, job = item
            error: BaseException | None = None
            work._start()
            try:
                job()
            except BaseException as caught:
                error = caught if isinstance(caught, CommError) else _wrap(work, caught)
            del job, item  # tensors are released as soon as the operation is over
            self._waiting.pop(0)
            work._finish(error)
            del work, error  # nor may what an error's traceback holds be kept until the next operation
        self._ident = 0


def _wrap(work: Work, error: BaseException) -> BaseException:
    error.add_note(f"raised by asynchronous {work.name} #{work.seq}") if hasattr(error, "add_note") else None
    return error


#: What torchcomms calls it.
TorchWork = Work
