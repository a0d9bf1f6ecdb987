"""The stream executor: operations put on a device's streams, complete when an event says so.

    run -> the current stream, or for async_op=True the communicator's own, which waits for the current one
        -> event before, the backend's calls, event after -> StreamWork
        -> the watchdog sees the second event: times for the recorder, done-callbacks, tensors released

The caller never waits for the device. One watchdog thread per process looks at the oldest operation of each
communicator, asks the backend for late errors, and ends what is overdue; the error is raised at the next
`wait` or call on this rank. A backend's call may itself wait on the host, for example until a peer connects.
So the operation is watched from before that call, which the abort of an overdue operation ends. An operation
that a graph captures is watched during the call only: it runs when the graph is replayed, and each replay is
watched (graphs.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from unicomm.comms.backend import UsesStreams
from unicomm.comms.errors import CommError, CommTimeoutError
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.executor import Executor
from unicomm.comms.execution.issued import IssuedOperation
from unicomm.comms.execution.profiling import events as profiling
from unicomm.comms.execution.profiling.session import Described, Span
from unicomm.comms.operations import recording
from unicomm.comms.streams import Streams
from unicomm.comms.work import Work

from . import graphs, watchdog
from .clock import DeviceClock
from .failures import Lookout
from .graphs import Capture, Captured
from .watchdog import LOOK
from .work import StreamWork

_parents: list[object] = []  # operations that were pending when this process was forked
_NO_SPANS: contextlib.AbstractContextManager[Sequence[Span]] = contextlib.nullcontext(())


class StreamExecutor(Executor):
    """Runs the operations of one communicator on a device's streams."""

    streams: Streams

    def __init__(self, engine: Engine, streams: Streams) -> None:
        self.streams = streams
        self._engine = engine
        self._recorder = engine.member.recorder
        self._own: Any = None  # this communicator's stream, made by the first asynchronous operation
        self._last: StreamWork | None = None  # which the next operation has to follow, on whatever stream
        self._last_captured: StreamWork | None = None  # the same within a graph
        self._clock = DeviceClock(streams)
        self._entering: IssuedOperation | None = None  # a thread is in the backend's calls for it
        self._entered_by = 0  # that thread, as `threading.get_ident` returns it
        self._calls_ended = False  # by the watchdog; then the communicator is broken
        self._running: deque[IssuedOperation] = deque()
        self._given_up: list[IssuedOperation] = []  # failed, but their stream may still use the tensors
        self._lock = threading.RLock()  # a callback may issue operations
        self.guard = threading.Lock()  # of a work's end, which its callbacks follow
        self.lookout = Lookout(engine)
        for graph_class in streams.graph_classes():
            graphs.follow(graph_class)
        streams.count_graphs = graphs.alive

    def run(self, op: IssuedOperation) -> StreamWork:
        op.begin(self._engine.member, False)
        if profiling.session is not None:
            profiling.issued(self._engine, op, here=True)
        try:
            self._engine.check_broken()
            return self._put(op)
        except BaseException as error:
            self._engine.failed(op, error)
            if op.args is not None:
                self._engine.hooks.finished(op.args, error)
            raise

    def settle(self, op: IssuedOperation, work: Work) -> None:
        if op.name == "barrier" and not op.async_op:
            work.wait()

    def _put(self, op: IssuedOperation) -> StreamWork:
        """Puts the operation on a stream. Raises what its `run` raises."""
        streams = self.streams
        current = stream = streams.current()
        capture = graphs.current() if streams.is_capturing() else None
        op.issued_ns = time.monotonic_ns()
        if op.async_op:
            if self._own is None:
                self._own = streams.new()
            stream = self._own
            streams.wait(stream, streams.record(current))
        self._follow_last(stream, capture)
        op.work = work = StreamWork(op.name, op.seq, self, stream)
        if capture is None:
            op.before = streams.record(stream)
        else:
            work._capture = capture
        run = op.run
        assert run is not None
        if op.spans:
            run = _within_events(op, run)
        op.deadline = op.issued_ns / 1e9 + op.timeout
        outer, self._entering, self._entered_by = self._entering, op, threading.get_ident()
        try:
            watchdog.watch(self)
            if stream is current:
                run()
            else:
                with streams.use(stream):
                    run()
            work._after = streams.record(stream)
            if capture is not None:
                # An operation on the current stream is ordered by that stream.
                self._last_captured = work if op.async_op else None
                self._capture(capture, op, work)
                return work
            self._last = work
            op.run = None
            if not op.async_op and streams.frees_in_order:
                op.calls = ()  # the allocator keeps the tensors' memory until the stream is through
            with self._lock:
                self._running.append(op)
        except CommError:
            if (cause := self._engine.broken) is None:
                raise
            raise cause.again(cause.message) from None  # the abort has ended the call
        finally:
            self._entering = outer
        return work

    def run_after_pending(self, job: Callable[[], None]) -> None:
        job()  # the order of streams does it

    def broke(self, error: CommError) -> None:
        self.lookout.ended(error)

    def catch_up(self) -> None:
        self.look(time.monotonic())

    def _follow_last(self, stream: Any, capture: Capture | None) -> None:
        """Orders later work of `stream` behind the last operation, on whatever stream that is."""
        last = self._last if capture is None else self._last_captured
        if last is not None and last._capture is capture and last._stream != stream and not last._done:
            self.streams.wait(stream, last._after)

    def last(self) -> StreamWork | None:
        """The operation that runs after all others that were issued; in the graph, if one is captured now."""
        return self._last_captured if self.streams.is_capturing() else self._last

    def follow_last(self) -> None:
        """Orders later work of the current stream behind the last operation, on whatever stream that is."""
        self._follow_last(self.streams.current(), None)

    def order_after(self, work: StreamWork) -> None:
        """Makes the current stream wait for `work`."""
        current = self.streams.current()
        if current != work._stream:
            self.streams.wait(current, work._after)
        if work._capture is not None:  # joined, as every branch of a graph has to be before its end
            work._held = ()
            if self._last_captured is work:
                self._last_captured = None

    # --- graphs --------------------------------------------------------------------------------------------

    def _capture(self, capture: Capture, op: IssuedOperation, work: StreamWork) -> None:
        """Adds an operation to the graph that captures it. The recorder marks it complete: replays count."""
        recorder, records = self._recorder, op.records
        if op.async_op:
            work._held = [tensor for call in op.calls for tensor in (*call.inputs, *call.outputs)]
        shapes = [recorder.shape(record) for record in records]
        for record in records:
            recorder.add_flags(record, recording.CAPTURED)
            recorder.start(record)
            recorder.finish(record, recording.COMPLETED, 0)
        pairs = [(send, peer) for send, peer, _ in op.messages]
        seqs = [number for _, _, number in op.messages] or [op.seq]
        described = [Described.of(call) for call in op.calls]
        capture.operations.append(Captured(self, op.name, op.timeout, shapes, seqs, described, pairs))
        for span in op.spans:
            span.captured()

    @contextlib.contextmanager
    def replaying(self, operations: Sequence[Captured], count: int) -> Iterator[None]:
        """Records and watches the `count`-th launch of a graph with these operations of this communicator."""
        engine, streams = self._engine, self.streams
        if streams.is_capturing():  # it becomes a part of another graph
            graphs.current().operations.extend(operations)
            yield
            return
        with engine.in_order():
            engine.check_open(operations[0].name)
            stream = streams.current()
            self._follow_last(stream, None)
            begun = graphs.begin_records(engine.fast, self._recorder, operations)
            longest = max(operation.timeout for operation in operations)
            op = IssuedOperation(operations[0].name, (), None, longest, async_op=True)
            op.records = begun.records
            op.seq = next(iter(begun.collectives), begun.messages[0][2] if begun.messages else 0)
            op.messages = () if begun.collectives else begun.messages
            try:
                rows = _NO_SPANS
                if profiling.session is not None:
                    rows = profiling.replay(engine, operations, begun.seqs, count)
                with rows as op.spans:
                    op.issued_ns, op.before = time.monotonic_ns(), streams.record(stream)
                    yield
            except BaseException:
                self._give_up(op.records)
                raise
            op.work = self._last = StreamWork(op.name, op.seq, self, stream)
            op.work._after = streams.record(stream)
            op.deadline = time.monotonic() + op.timeout
            with self._lock:
                self._running.append(op)
            watchdog.watch(self)

    def _give_up(self, records: Sequence[int]) -> None:
        for record in records:
            self._recorder.finish(record, recording.FAILED, recording.OTHER_ERROR)

    # --- the watchdog --------------------------------------------------------------------------------------

    def error_of(self, work: StreamWork) -> BaseException | None:
        """The error that broke the communicator or is about to, unless the operation had completed before."""
        return None if work._done else self._engine.broken or self._of_symmetric_memory()

    @property
    def running(self) -> IssuedOperation | None:
        return self._entering

    @property
    def busy(self) -> bool:
        return bool(self._running or self._given_up or self._entering)

    def pending(self) -> list[StreamWork]:
        entering, pending = self._entering, list(self._running)
        if entering is not None and entering not in pending:
            pending.append(entering)
        return [op.work for op in pending]

    def drain(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while self._running or self._other_thread_enters():
            self.look(time.monotonic())
            if not self._running and not self._other_thread_enters():
                break
            if time.monotonic() >= end:
                return False
            time.sleep(LOOK / 10)
        return True

    def _other_thread_enters(self) -> bool:
        return self._entering is not None and self._entered_by != threading.get_ident()

    def check_can_close(self) -> None:
        if (op := self._entering) is not None and not self._other_thread_enters():
            self._engine.refuse_to_end(f"{op.name} #{op.seq}")

    def look(self, now: float) -> None:
        """Ends the operations that are over. Called by the watchdog and by `drain`."""
        self._look_at_calls(now)
        engine = self._engine
        with graphs.events_may_be_asked_for() as free, self._lock:
            if not free:
                return
            self._given_up = [op for op in self._given_up if self._may_come(op)]
            error: BaseException | None = None
            while self._running and error is None:
                try:
                    over = self._is_over(self._running[0])
                    error = self._of_symmetric_memory()
                    if error is not None or not over:
                        break
                except Exception as failed:  # the device failed: no operation will complete any more
                    error = failed
                else:
                    if engine.broken is not None:  # an abort may be what ended it
                        break
                    self._finish(self._running.popleft(), None)
            if not self._running:
                return
            oldest = self._running[0]
            error = error or engine.broken or self.lookout.heard or self._library_error()
            error = error or self.lookout.lost(oldest, now)
            if error is None and now >= oldest.deadline:
                error = _overdue(oldest)
            if error is None:
                self.lookout.waiting(oldest, now)
            else:
                if isinstance(error, CommError) and error is not engine.broken:
                    error = self.lookout.explained(error, oldest)
                self._end(error)

    def _look_at_calls(self, now: float) -> None:
        """Ends the calls of the backend that a thread is in if their operation is overdue or another rank has
        failed. Asks for no event, so a capture does not matter."""
        engine = self._engine
        with self._lock:
            op = self._entering
            if op is None or self._calls_ended:
                return
            error = engine.broken or self.lookout.heard or (_overdue(op) if now >= op.deadline else None)
            if error is not None:
                self._calls_ended = True
                if error is not engine.broken:
                    error = self.lookout.explained(error, op)
                self._fail(op, error)
            elif not self._running:
                self.lookout.waiting(op, now)

    def _library_error(self) -> CommError | None:
        backend = self._engine.backend
        return backend.late_error() if isinstance(backend, UsesStreams) else None

    def _of_symmetric_memory(self) -> CommError | None:
        """The error that ended a wait of symmetric memory's kernels; their operation then is over as well."""
        memory = self._engine.symmetric
        return None if memory is None or self._engine.broken is not None else memory.late_error()

    def _is_over(self, op: IssuedOperation) -> bool:
        if self.streams.is_over(op.work._after):
            return True
        if not op.reached and self.streams.is_over(op.before):
            op.reached = True
            for record in op.records:
                self._recorder.start(record)
        return False

    def _finish(self, op: IssuedOperation, error: BaseException | None) -> None:
        try:
            self._finish_records(op, error)
        finally:  # a thread may wait for it, whatever the device says of its events
            op.work._over(error)

    def _finish_records(self, op: IssuedOperation, error: BaseException | None) -> None:
        if error is None:
            seen, day = time.monotonic_ns(), time.time_ns()
            start, end = self._clock.place(op.before, op.work._after, op.issued_ns, seen)
            for record in op.records:
                self._recorder.start(record, seen - start)
                self._recorder.finish(record, recording.COMPLETED, 0, seen - end)
            for span in op.spans:
                span.ran(day - (seen - start), day - (seen - end))
        else:
            for span in op.spans:
                span.finish(error)
        if op.args is not None:
            self._engine.hooks.finished(op.args, error)

    def _end(self, error: BaseException) -> None:
        """Ends the oldest operation with its error, and those behind it with the abort that follows."""
        first = self._running[0]
        self._fail(first, error)
        final = self._engine.broken or error
        while self._running:
            op = self._running.popleft()
            if op.calls and self._may_come(op):
                self._given_up.append(op)
            if op is not first:
                self._give_up(op.records)
            self._finish(op, error if op is first and isinstance(error, CommError) else final)

    def _fail(self, op: IssuedOperation, error: BaseException) -> None:
        engine = self._engine
        try:
            engine.failed(op, error)
            engine.backend.abort()
        except Exception:  # of a hook; the works must end all the same
            logging.getLogger("unicomm").exception("communicator '%s'", engine.name)

    def _may_come(self, op: IssuedOperation) -> bool:
        """Whether the stream may still reach the operation and use its tensors."""
        try:
            return not self.streams.is_over(op.work._after)
        except Exception:  # of the device
            return False

    def forget(self) -> None:
        """Gives everything up in a forked child, but frees nothing: that would use the device."""
        _parents.append((self._running, self._given_up))
        self._running, self._given_up, self._entering = deque(), [], None


def _overdue(op: IssuedOperation) -> CommTimeoutError:
    return CommTimeoutError(
        f"not finished on the device within {op.timeout:g} s",
        hint="find out who is missing with `unicomm trace analyze`; comm.set_timeout or timeout= allow more",
    )


def _within_events(op: IssuedOperation, run: Callable[[], None]) -> Callable[[], None]:
    """`run` with the profiler's events around it, which show where the operation was put on its stream."""

    def observed() -> None:
        for span in op.spans:
            span.enter()
        try:
            run()
        except BaseException as error:
            for span in op.spans:
                span.finish(error)
            raise
        finally:
            for span in reversed(op.spans):
                span.leave()

    return observed
