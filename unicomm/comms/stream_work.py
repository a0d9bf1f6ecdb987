"""Operations on a device: put on a stream, over when an event says so, watched by one thread a process.

    call -> the current stream, or with async_op=True the communicator's own, which waits for the current one
         -> event before, the backend's calls, event after -> StreamWork
         -> the watchdog sees the second event: times into the recorder, done-callbacks, tensors let go

Who calls never waits for the device. The watchdog looks at the oldest operation of each communicator, asks
the backend for errors that came later, and ends what is overdue; the error is raised at the next `wait` or
call on this rank. What a graph takes down is not watched: it runs when the graph is replayed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import recording
from .call import OpArgs
from .errors import CommError, CommTimeoutError, NotReadyError
from .options import seconds
from .stream_failures import Lookout, Message, Pending
from .streams import Streams
from .work import Work, WorkStatus

if TYPE_CHECKING:
    from .engine import Engine

_LOOK = 0.001  # seconds between two looks while something new runs, growing ...
_LONGEST_LOOK = 0.02  # ... up to this
_LOOKS_WITHOUT = 500  # looks without anything to watch until the thread ends


class StreamWork(Work):
    """The handle of an operation on a device.

    `wait()` makes the current stream wait for the result and returns at once; with a timeout, of a barrier,
    and as `wait_blocking`, it blocks the host until the device has done it.
    """

    def __init__(self, name: str, seq: int, queue: StreamQueue, stream: Any) -> None:
        super().__init__(name, seq, False)
        self._queue = queue
        self._stream = stream
        self._after: Any = None
        self._captured = False
        self._done = False
        self._guard = threading.Lock()
        self._to_call: list[Callable[[Work], None]] = []

    def wait(self, timeout: timedelta | float | None = None) -> None:
        if timeout is not None or (self.name == "barrier" and not self._captured):
            self.wait_blocking(timeout)
            return
        self._raise()
        if not self._done:
            self._queue.order_after(self)

    def wait_blocking(self, timeout: timedelta | float | None = None) -> None:
        if self._captured:
            raise NotReadyError(
                "an operation that a graph takes down has not run: the host cannot wait for it",
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
                raise CommTimeoutError(
                    f"not finished within {limit:g} s of waiting; it goes on",
                    op=self.name,
                    seq=self.seq,
                    hint="wait again, or look at the recorder (unicomm trace show) for who is missing",
                )
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_LOOK)
        self._raise()

    def is_completed(self) -> bool:
        if self._done or self._error is not None:
            return True
        return not self._captured and self._queue.streams.is_over(self._after)

    @property
    def status(self) -> WorkStatus:
        if self._error is not None:
            return WorkStatus.TIMEDOUT if isinstance(self._error, CommTimeoutError) else WorkStatus.ERROR
        return WorkStatus.COMPLETED if self.is_completed() else WorkStatus.INPROGRESS

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(work)` once it is over: now if that is known, else in the watchdog's thread."""
        with self._guard:
            if not self._done:
                self._to_call.append(callback)
                return
        self._call(callback)

    def _raise(self) -> None:
        if self._error is None:
            self._error = self._queue.error_of(self)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _over(self, error: BaseException | None) -> None:
        with self._guard:
            self._error = error
            self._done = True
            callbacks, self._to_call = self._to_call, []
        for callback in callbacks:
            self._call(callback)


@dataclass(slots=True)
class _Running:
    """An operation that the watchdog looks after. `held`: tensors that must live until it is over."""

    work: StreamWork
    before: Any
    records: Sequence[int]
    args: OpArgs | None
    held: Sequence[Any]
    pending: Pending


class StreamQueue:
    """The operations of one communicator on its device's streams."""

    def __init__(self, engine: Engine, streams: Streams) -> None:
        self.streams = streams
        self._engine = engine
        self._recorder = engine.member.recorder
        self._own: Any = None  # made by the first asynchronous operation
        self._last: StreamWork | None = None  # that what comes next has to follow, on whatever stream
        self._running: deque[_Running] = deque()
        self._lock = threading.RLock()  # a callback may issue operations
        self.lookout = Lookout(engine)

    def issue(
        self,
        run: Callable[[], None],
        name: str,
        seq: int,
        records: Sequence[int],
        timeout: float,
        async_op: bool,
        args: OpArgs | None,
        held: Sequence[Any],
        messages: Sequence[Message] = (),
    ) -> StreamWork:
        """Puts an operation on a stream. Called in the order of the operations. Raises what `run` raises.

        `messages`: of a send, receive or batch.
        """
        streams = self.streams
        current = stream = streams.current()
        captured = streams.is_capturing()
        if async_op:
            if self._own is None:
                self._own = streams.new()
            stream = self._own
            streams.wait(stream, streams.record(current))
        last = self._last
        if last is not None and last._captured == captured and last._stream != stream and not last._done:
            streams.wait(stream, last._after)
        work = StreamWork(name, seq, self, stream)
        work._captured = captured
        before = None if captured else streams.record(stream)
        if stream is current:
            run()
        else:
            with streams.use(stream):
                run()
        work._after = streams.record(stream)
        # Within a graph what runs on the current stream is ordered by it, and the graph ends unannounced.
        self._last = work if async_op or not captured else None
        if not captured:
            pending = Pending(name, seq, messages, timeout, time.monotonic() + timeout)
            with self._lock:
                self._running.append(_Running(work, before, records, args, held, pending))
            _watchdog.watch(self)
        return work

    def order_after(self, work: StreamWork) -> None:
        """Makes the current stream wait for it."""
        current = self.streams.current()
        if current != work._stream:
            self.streams.wait(current, work._after)
        if work._captured and self._last is work:
            self._last = None  # joined, as every branch of a graph has to be before its end

    def error_of(self, work: StreamWork) -> BaseException | None:
        """The error that ended the communicator, if this operation had not been over before."""
        return None if work._done else self._engine.broken

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def pending(self) -> list[StreamWork]:
        return [running.work for running in list(self._running)]

    def drain(self, timeout: float) -> bool:
        """Waits until everything that was issued is over; False when it is not within `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._running:
            self.look(time.monotonic())
            if self._running and time.monotonic() >= end:
                return False
            if self._running:
                time.sleep(_LOOK / 10)
        return True

    def look(self, now: float) -> None:
        """Takes out what is over. Called by the watchdog and by whoever drains."""
        engine = self._engine
        with self._lock:
            error: BaseException | None = None
            while self._running and error is None:
                try:
                    if not self._is_over(self._running[0]):
                        break
                except Exception as failed:  # of the device: nothing more will be over
                    error = failed
                else:
                    if engine.broken is not None:  # then an abort may be what has ended it
                        break
                    self._finish(self._running.popleft(), None)
            if not self._running:
                return
            pending = self._running[0].pending
            error = error or engine.broken or self.lookout.heard or engine.backend.late_error()
            if error is None and now >= pending.deadline:
                error = CommTimeoutError(
                    f"not finished on the device within {pending.timeout:g} s",
                    hint="find out who is missing with `unicomm trace analyze`; "
                    "comm.set_timeout or timeout= allow more",
                )
            if error is None:
                self.lookout.waiting(pending, now)
            else:
                if isinstance(error, CommError) and error is not engine.broken:
                    error = self.lookout.explained(error, pending)
                self._end(error)

    def _is_over(self, running: _Running) -> bool:
        if self.streams.is_over(running.work._after):
            return True
        if not running.pending.reached and self.streams.is_over(running.before):
            running.pending.reached = True
            for record in running.records:
                self._recorder.start(record)
        return False

    def _finish(self, running: _Running, error: BaseException | None) -> None:
        engine, work = self._engine, running.work
        if error is None:
            elapsed = int(self.streams.elapsed(running.before, work._after) * 1e9)
            for record in running.records:
                self._recorder.start(record, elapsed)
                self._recorder.finish(record, recording.COMPLETED, 0)
        if running.args is not None:
            engine.hooks.finished(running.args, error)
        work._over(error)

    def _end(self, error: BaseException) -> None:
        """One failed, and with it all that comes after it. The library's kernels end by its abort."""
        engine = self._engine
        first = self._running[0]
        try:
            engine.late_failure(error, first.work.name, first.work.seq, first.records)
        except Exception:  # a hook's; the works must end all the same
            logging.getLogger("unicomm").exception("communicator '%s'", engine.name)
        final = engine.broken or error
        while self._running:
            running = self._running.popleft()
            if running is not first:
                for record in running.records:
                    self._recorder.finish(record, recording.FAILED, recording.OTHER_ERROR)
            self._finish(running, error if running is first and isinstance(error, CommError) else final)

    def forget(self) -> None:
        """In a forked child, where the device cannot be used."""
        self._running.clear()


class _Watchdog:
    """The thread that looks after all communicators' operations; there is one while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[StreamQueue] = []
        self._fresh = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, queue: StreamQueue) -> None:
        with self._lock:
            if queue not in self._queues:
                self._queues.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="unicomm-watchdog", daemon=True)
                self._thread.start()
            self._fresh.set()

    def _loop(self) -> None:
        nap, idle = _LOOK, 0
        while True:
            if self._fresh.is_set():
                self._fresh.clear()
                nap = _LOOK
            time.sleep(nap)
            nap = min(nap * 1.5, _LONGEST_LOOK)
            now = time.monotonic()
            for queue in list(self._queues):
                queue.look(now)
            with self._lock:
                self._queues = [queue for queue in self._queues if queue.busy]
                idle = 0 if self._queues else idle + 1
                if idle > _LOOKS_WITHOUT:
                    self._thread = None
                    return


_watchdog = _Watchdog()


def forget_after_fork() -> None:
    """In a forked child, which has no such thread."""
    global _watchdog
    _watchdog = _Watchdog()
