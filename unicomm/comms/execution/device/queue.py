"""Operations on a device: put on a stream, over when an event says so, watched by one thread a process.

    call -> the current stream, or with async_op=True the communicator's own, which waits for the current one
         -> event before, the backend's calls, event after -> StreamWork
         -> the watchdog sees the second event: times into the recorder, done-callbacks, tensors let go

Who calls never waits for the device. The watchdog looks at the oldest operation of each communicator, asks
the backend for errors that came later, and ends what is overdue; the error is raised at the next `wait` or
call on this rank. What a graph captures is not watched: it runs when the graph is replayed, which is
(graphs.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unicomm.comms.backend import Streams, UsesStreams
from unicomm.comms.errors import CommError, CommTimeoutError
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import OpArgs

from . import graphs, watchdog
from .clock import DeviceClock
from .failures import Lookout, Message, Pending
from .graphs import Capture, Captured
from .watchdog import LOOK
from .work import StreamWork

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.execution.profiling.session import Described, Span

_parents: list[object] = []  # what was under way when this process was forked
_NO_ROWS: contextlib.AbstractContextManager[Sequence[Span]] = contextlib.nullcontext(())


@dataclass(slots=True)
class _Running:
    """An operation that the watchdog looks after, or the replay of a graph.

    `held`: tensors that must live until it is over. `spans`: of the profiler.
    """

    work: StreamWork
    before: Any
    records: Sequence[int]
    args: OpArgs | None
    held: Sequence[Any]
    pending: Pending
    issued_ns: int
    spans: Sequence[Span] = ()


class StreamQueue:
    """The operations of one communicator on its device's streams."""

    def __init__(self, engine: Engine, streams: Streams) -> None:
        self.streams = streams
        self._engine = engine
        self._recorder = engine.member.recorder
        self._own: Any = None  # made by the first asynchronous operation
        self._last: StreamWork | None = None  # that what comes next has to follow, on whatever stream
        self._last_captured: StreamWork | None = None  # the same within a graph
        self._clock = DeviceClock(streams)
        self._running: deque[_Running] = deque()
        self._given_up: list[_Running] = []  # failed, but their stream may still use the tensors
        self._lock = threading.RLock()  # a callback may issue operations
        self.guard = threading.Lock()  # of a work's end, which its callbacks follow
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
        spans: Sequence[Span] = (),
        about: Callable[[], Sequence[Described]] = tuple,
    ) -> StreamWork:
        """Puts an operation on a stream. Called in the order of the operations. Raises what `run` raises.

        `messages`: of a send, receive or batch. `spans`: of the profiler, to be told when it ran. `about`:
        what the profiler says of each record, asked for by a graph.
        """
        streams = self.streams
        current = stream = streams.current()
        capture = graphs.current() if streams.is_capturing() else None
        issued_ns = time.monotonic_ns()
        if async_op:
            if self._own is None:
                self._own = streams.new()
            stream = self._own
            streams.wait(stream, streams.record(current))
        self._follow_last(stream, capture)
        work = StreamWork(name, seq, self, stream)
        before = None
        if capture is None:
            before = streams.record(stream)
        else:
            work._capture = capture
        if stream is current:
            run()
        else:
            with streams.use(stream):
                run()
        work._after = streams.record(stream)
        if capture is not None:
            # What runs on the current stream is ordered by it.
            self._last_captured = work if async_op else None
            work._held = held if async_op else ()
            self._note(capture, name, seq, timeout, records, messages, about())
            for span in spans:
                span.captured()
            return work
        self._last = work
        pending = Pending(name, seq, messages, timeout, issued_ns / 1e9 + timeout)
        with self._lock:
            self._running.append(_Running(work, before, records, args, held, pending, issued_ns, spans))
        watchdog.watch(self)
        return work

    def _follow_last(self, stream: Any, capture: Capture | None) -> None:
        """What the stream gets comes after the operation before, on whatever stream that is."""
        last = self._last if capture is None else self._last_captured
        if last is not None and last._capture is capture and last._stream != stream and not last._done:
            self.streams.wait(stream, last._after)

    def last(self) -> StreamWork | None:
        """What runs after all others that were issued, in the graph if one is captured now."""
        return self._last_captured if self.streams.is_capturing() else self._last

    def follow_last(self) -> None:
        """What the current stream gets comes after the last operation, on whatever stream that is."""
        self._follow_last(self.streams.current(), None)

    def order_after(self, work: StreamWork) -> None:
        """Makes the current stream wait for it."""
        current = self.streams.current()
        if current != work._stream:
            self.streams.wait(current, work._after)
        if work._capture is not None:  # joined, as every branch of a graph has to be before its end
            work._held = ()
            if self._last_captured is work:
                self._last_captured = None

    # --- graphs --------------------------------------------------------------------------------------------

    def _note(
        self,
        capture: Capture,
        name: str,
        seq: int,
        timeout: float,
        records: Sequence[int],
        messages: Sequence[Message],
        described: Sequence[Described],
    ) -> None:
        """Notes an operation that a graph captures: over for the recorder, which gets its replays."""
        recorder = self._recorder
        shapes = [recorder.shape(record) for record in records]
        for record in records:
            recorder.add_flags(record, recording.CAPTURED)
            recorder.start(record)
            recorder.finish(record, recording.COMPLETED, 0)
        pairs = [(send, peer) for send, peer, _ in messages]
        seqs = [number for _, _, number in messages] or [seq]
        capture.operations.append(Captured(self, name, timeout, shapes, seqs, described, pairs))

    @contextlib.contextmanager
    def replaying(self, operations: Sequence[Captured], count: int) -> Iterator[None]:
        """Around the `count`-th launch of a graph with these operations of this communicator."""
        engine, streams = self._engine, self.streams
        if streams.is_capturing():  # it becomes a part of another graph
            graphs.current().operations.extend(operations)
            yield
            return
        with engine._in_order():
            engine.check_open(operations[0].name)
            stream = streams.current()
            self._follow_last(stream, None)
            begun = graphs.begin_records(engine.fast, self._recorder, operations)
            records, messages = begun.records, begun.messages
            seq = next(iter(begun.collectives), messages[0][2] if messages else 0)
            try:
                observed = _NO_ROWS
                if profiling.session is not None:
                    observed = profiling.replay(engine, operations, begun.seqs, count)
                with observed as spans:
                    issued_ns, before = time.monotonic_ns(), streams.record(stream)
                    yield
            except BaseException:
                self._give_up(records)
                raise
            work = StreamWork(operations[0].name, seq, self, stream)
            work._after = streams.record(stream)
            self._last = work
            timeout = max(operation.timeout for operation in operations)
            asked = () if begun.collectives else messages
            pending = Pending(work.name, seq, asked, timeout, time.monotonic() + timeout)
            with self._lock:
                self._running.append(_Running(work, before, records, None, (), pending, issued_ns, spans))
            watchdog.watch(self)

    def _give_up(self, records: Sequence[int]) -> None:
        for record in records:
            self._recorder.finish(record, recording.FAILED, recording.OTHER_ERROR)

    # --- the watchdog --------------------------------------------------------------------------------------

    def error_of(self, work: StreamWork) -> BaseException | None:
        """The error that ended the communicator, if this operation had not been over before."""
        return None if work._done else self._engine.broken

    @property
    def busy(self) -> bool:
        return bool(self._running or self._given_up)

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
                time.sleep(LOOK / 10)
        return True

    def look(self, now: float) -> None:
        """Takes out what is over. Called by the watchdog and by whoever drains."""
        engine = self._engine
        with graphs.events_may_be_asked_for() as free, self._lock:
            if not free:
                return
            self._given_up = [running for running in self._given_up if self._may_come(running)]
            error: BaseException | None = None
            while self._running and error is None:
                try:
                    over = self._is_over(self._running[0])
                    error = self._of_symmetric_memory()
                    if error is not None or not over:
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
            error = error or engine.broken or self.lookout.heard or self._library_error()
            error = error or self.lookout.lost(pending, now)
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

    def _library_error(self) -> CommError | None:
        backend = self._engine.backend
        return backend.late_error() if isinstance(backend, UsesStreams) else None

    def _of_symmetric_memory(self) -> CommError | None:
        """What ended a wait of its kernels, after which their operation is over like any other."""
        memory = self._engine.symmetric
        return None if memory is None or self._engine.broken is not None else memory.late_error()

    def _is_over(self, running: _Running) -> bool:
        if self.streams.is_over(running.work._after):
            return True
        if not running.pending.reached and self.streams.is_over(running.before):
            running.pending.reached = True
            for record in running.records:
                self._recorder.start(record)
        return False

    def _finish(self, running: _Running, error: BaseException | None) -> None:
        try:
            self._take_down(running, error)
        finally:  # whatever the device says of its events: somebody waits
            running.work._over(error)

    def _take_down(self, running: _Running, error: BaseException | None) -> None:
        engine, work = self._engine, running.work
        if error is None:
            seen, day = time.monotonic_ns(), time.time_ns()
            start, end = self._clock.place(running.before, work._after, running.issued_ns, seen)
            for record in running.records:
                self._recorder.start(record, seen - start)
                self._recorder.finish(record, recording.COMPLETED, 0, seen - end)
            for span in running.spans:
                span.ran(day - (seen - start), day - (seen - end))
        else:
            for span in running.spans:
                span.finish(error)
        if running.args is not None:
            engine.hooks.finished(running.args, error)

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
            if running.held and self._may_come(running):
                self._given_up.append(running)
            if running is not first:
                self._give_up(running.records)
            self._finish(running, error if running is first and isinstance(error, CommError) else final)

    def _may_come(self, running: _Running) -> bool:
        """Whether the stream may still come to it, and use its tensors."""
        try:
            return not self.streams.is_over(running.work._after)
        except Exception:  # of the device
            return False

    def forget(self) -> None:
        """In a forked child, where the device cannot be used: nor may events and tensors be given back."""
        _parents.append((self._running, self._given_up))
        self._running, self._given_up = deque(), []
