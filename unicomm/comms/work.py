"""Work: the handle of an operation."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any, Protocol

from unicomm import _core

from .errors import CommError, CommTimeoutError, NotReadyError
from .options import seconds

# Seconds for which a wait blocks at a time. A signal that arrives just before Python blocks on a lock does
# not wake it: without an end of the blocking, Ctrl-C would do nothing until the operation is over. Not less,
# as the search for deadlocks takes a thread that often wakes for a running one
# (failures/thread_quiescence.py).
_PART = 1.0


class WorkStatus(enum.Enum):
    NOT_STARTED = "not started"
    INPROGRESS = "in progress"
    COMPLETED = "completed"
    ERROR = "error"
    TIMEDOUT = "timed out"


class Runner(Protocol):
    """The thread that runs an asynchronous operation, as its Work sees it."""

    def amid(self) -> str:
        """What the caller's thread has to run first, in a callback or a signal handler; "" if nothing."""


class Work(_core.WorkBase):
    """The handle of an operation. That of a synchronous operation has completed.

    Tensors of an asynchronous operation must not be touched until `wait()` has returned. Dropping a Work
    neither blocks nor cancels the operation; its tensors are kept alive until it has run.
    """

    #: The other rank of a message, once it is over; -1 where there is none.
    peer: int = -1
    # Class attributes, so that a Work that has completed, made in every synchronous call, stores nothing.
    _error: BaseException | None = None
    _pending = False
    _started = True
    _lock: threading.Lock | None = None
    _worker: Runner | None = None
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
            if self._worker is not None and (first := self._worker.amid()):
                error = NotReadyError(
                    f"cannot wait here, in the midst of {first}: this very thread has to run that first",
                    op=self.name,
                    seq=self.seq,
                    hint="add another callback instead of waiting in one; a signal handler must not wait",
                )
                error.amid = True
                raise error
            end = math.inf if limit < 0 else time.monotonic() + limit
            # In this frame, by which a thread that waits here is known (failures/thread_quiescence.py).
            while not self._lock.acquire(timeout=max(0.0, min(_PART, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise self._late(limit)
            self._lock.release()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _late(self, limit: float) -> CommTimeoutError:
        return CommTimeoutError(
            f"not finished within {limit:g} s of waiting; it goes on",
            op=self.name,
            seq=self.seq,
            hint="wait again, or look at the recorder (unicomm trace show) for who is missing",
        )

    def __await__(self) -> Generator[Any, None, None]:
        """`await work`: like `wait_blocking`, but suspends the coroutine instead of blocking its thread."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not over.done():
                over.set_result(None)

        def tell(_: Work) -> None:
            loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        yield from over.__await__()
        self.wait_blocking()

    def wait_blocking(self, timeout: timedelta | float | None = None) -> None:
        """Like `wait`, but blocks the host until the operation has completed on any kind of device.

        Raises as `wait` does, with `timeout` in seconds.
        """
        self.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error. Never blocks, never raises."""
        return not self._pending

    @property
    def status(self) -> WorkStatus:
        """How far the operation is, without waiting for it."""
        if self._pending:
            return WorkStatus.INPROGRESS if self._started else WorkStatus.NOT_STARTED
        if self._error is None:
            return WorkStatus.COMPLETED
        return WorkStatus.TIMEDOUT if isinstance(self._error, CommTimeoutError) else WorkStatus.ERROR

    def exception(self) -> BaseException | None:
        """The operation's error once it is over, or None. Does not wait."""
        return self._error

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(work)` once the operation is over: now if it is, else in the thread that runs it.

        That thread runs the communicator's next operations, so a callback must not wait for them. An
        exception of a callback is logged and changes nothing.
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
        except Exception:  # must not end the thread that runs the following operations
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
        """Ends the work with an error, in a forked child, where the operation will never end."""
        self._error = NotReadyError(
            "pending in the process that this one was forked from",
            op=self.name,
            seq=self.seq,
            hint="wait for it there",
        )
        self._pending = False

    def __repr__(self) -> str:
        return f"<Work {self.name} #{self.seq}: {self.status.value}>"


def wait_all(works: Iterable[Work], timeout: timedelta | float | None = None) -> None:
    """Waits for all `works`, as `Work.wait` does; `timeout` (seconds) is for all of them together.

    Waits for every work, also when one has failed; then raises the error of the first that failed in the
    order given.
    """
    limit = seconds(timeout, -1.0)
    end = time.monotonic() + limit
    failed: BaseException | None = None
    for work in works:
        try:
            work.wait(None if limit < 0 else max(1e-9, end - time.monotonic()))
        except BaseException as error:
            if not isinstance(error, CommError):
                raise
            failed = failed or error
    if failed is not None:
        raise failed


#: What torchcomms calls it.
TorchWork = Work
