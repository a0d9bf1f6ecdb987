"""The handle of an operation on a device."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from unicomm.comms.errors import CommTimeoutError, NotReadyError
from unicomm.comms.options import seconds
from unicomm.comms.streams import Streams
from unicomm.comms.work import Work, WorkStatus

from .watchdog import LONGEST_LOOK

if TYPE_CHECKING:
    from torch.futures import Future


class Streamed(Protocol):
    """The stream executor, as its works see it. `guard`: of a work's end, which its callbacks follow."""

    streams: Streams
    guard: threading.Lock

    def order_after(self, work: StreamWork) -> None: ...

    def error_of(self, work: StreamWork) -> BaseException | None: ...


class StreamWork(Work):
    """The handle of an operation on a device.

    `wait()` makes the current stream wait for the result and returns at once; with a timeout, of a barrier,
    and as `wait_blocking`, it blocks the host until the device has done it.
    """

    # Class attributes save an assignment in each call.
    _after: Any = None
    _capture: object = None  # the capture of a graph that it is a part of
    _held: Sequence[Any] = ()  # tensors of a branch of a graph, until it is joined
    _done = False
    _to_call: list[Callable[[Work], None]] | None = None

    def __init__(self, name: str, seq: int, executor: Streamed, stream: Any) -> None:
        self.name = name
        self.seq = seq
        self._executor = executor
        self._stream = stream

    @property
    def streams(self) -> Streams:
        """The streams of its device."""
        return self._executor.streams

    def wait(self, timeout: timedelta | float | None = None) -> None:
        if timeout is not None or (self.name == "barrier" and self._capture is None):
            self.wait_blocking(timeout)
            return
        self._raise()
        if not self._done:
            self._executor.order_after(self)

    def wait_blocking(self, timeout: timedelta | float | None = None) -> None:
        if self._capture is not None:
            raise NotReadyError(
                "the host cannot wait for an operation that a graph captures: it has not run",
                op=self.name,
                seq=self.seq,
                hint="wait() orders it within the graph; synchronise after the replay",
            )
        limit = seconds(timeout, -1.0)
        end = time.monotonic() + limit if limit >= 0 else float("inf")
        nap = 20e-6
        while not self.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                raise self._late(limit)
            time.sleep(min(nap, left))
            nap = min(2 * nap, LONGEST_LOOK)
        self._raise()

    def future(self) -> tuple[Future[Any], contextlib.AbstractContextManager[Any]] | None:
        """A future whose `wait()` orders streams, and the stream to complete it on; see `Streams.future`."""
        streams = self._executor.streams
        made = streams.future()
        return None if made is None else (made, streams.use(self._stream))

    def is_completed(self) -> bool:
        if self._done or self._error is not None:
            return True
        return self._capture is None and self._executor.streams.is_over(self._after)

    @property
    def status(self) -> WorkStatus:
        if not self.is_completed():
            return WorkStatus.INPROGRESS
        if (error := self._failure()) is None:
            return WorkStatus.COMPLETED
        return WorkStatus.TIMEDOUT if isinstance(error, CommTimeoutError) else WorkStatus.ERROR

    def exception(self) -> BaseException | None:
        return self._failure() if self.is_completed() else None

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(work)` when the operation is over: now if known, else in the watchdog's thread."""
        with self._executor.guard:
            if not self._done:
                self._to_call = [*(self._to_call or ()), callback]
                return
        self._call(callback)

    def _failure(self) -> BaseException | None:
        """The error of the operation, or the one that broke the communicator before it was known to be over.

        A completed event of the device does not prove success: an abort completes events, too.
        """
        # Read again at the end: the watchdog may have ended the operation in between.
        return self._error or self._executor.error_of(self) or self._error

    def _raise(self) -> None:
        if (error := self._failure()) is None:
            return
        with self._executor.guard:
            if not self._done:
                self._error = error
        raise error.with_traceback(None)

    def _over(self, error: BaseException | None) -> None:
        with self._executor.guard:
            self._error = error
            self._done = True
            callbacks, self._to_call = self._to_call, None
        for callback in callbacks or ():
            self._call(callback)
