"""The message queue: sends and receives of a process group, which run side by side and end one by one.

torch.distributed lets a program start any number of isend and irecv and wait for them in any order, so a
message that waits for its peer must not hold up the next one. Messages that are issued with no other
operation between them share a queue, and join it also while earlier ones are under way. Another operation of
the communicator seals the queue and runs after it.

At first nobody runs the messages. A thread that waits for one of them runs the queue meanwhile, so that a
blocking send or receive costs no switch of threads. If no thread waits, the communicator's worker takes over
after a millisecond.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta

from unicomm.c10d.compat import no_events
from unicomm.comms.backend import Exchange
from unicomm.comms.errors import CommError, NotReadyError
from unicomm.comms.failures.faults import interrupts
from unicomm.comms.failures.thread_start import start
from unicomm.comms.operations import recording
from unicomm.comms.options import seconds
from unicomm.comms.work import Work

from .composed import completion
from .composed.exchanges import open_exchange
from .engine import Engine
from .issued import ANY_RANK, IssuedOperation
from .profiling import events as profiling
from .worker import Worker

_FOREVER = 1e12


class QueuedWork(Work):
    """The handle of a queued message. `peer`: the other rank, once the message is over."""

    __slots__ = ("_queue", "peer")

    def __init__(self, name: str, seq: int, queue: MessageQueue, worker: Worker) -> None:
        super().__init__(name, seq, True)
        self._queue = queue
        self._worker = worker
        self.peer = ANY_RANK

    def wait(self, timeout: timedelta | float | None = None) -> None:
        if self._pending:
            limit = seconds(timeout, _FOREVER)
            end = time.monotonic() + limit
            self._queue.await_work(self)
            try:
                self._queue.drive_for(self, limit)
                if self._pending and timeout is not None:
                    timeout = max(1e-9, end - time.monotonic())
                super().wait(timeout)
            finally:
                self._queue.leave_work(self)
        else:
            super().wait(timeout)

    def is_completed(self) -> bool:
        if self._pending:
            self._queue.hand_over()
        return not self._pending


class MessageQueue:
    """The queue of one communicator. An operation in it is one message; its `work` is a `QueuedWork`.

    `awaited`: the works that threads wait for.
    """

    GRACE = 0.001  # seconds from the last message until the worker takes over

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self._engine = engine
        self._worker = worker
        self.awaited: list[QueuedWork] = []
        engine.fast.block()  # until the queue is closed: a later operation must not overtake it
        self._exchange: Exchange | None = None  # until a thread runs the messages
        self._lock = threading.Lock()
        self._driving = threading.Lock()  # held by the thread that runs the messages
        self._driver = 0
        self._inbox: list[IssuedOperation] = []
        self._running: dict[int, IssuedOperation] = {}
        self._ending: IssuedOperation | None = None  # it is over, and its work is not yet
        self._added = 0
        self._waiters = 0
        self._sealed = False
        self._handed = False
        self._closed = False
        self.touched = time.monotonic()

    @property
    def open(self) -> bool:
        """Whether a message may join."""
        return not (self._sealed or self._closed)

    @property
    def unattended(self) -> bool:
        """Whether the queue is open and holds messages that have not started and that no thread runs."""
        return self.open and self.idle and bool(self._inbox)

    @property
    def idle(self) -> bool:
        """Whether the queue has messages that no thread runs or is about to run."""
        return not (self._handed or self._closed or self._driver)

    def post(self, op: IssuedOperation) -> bool:
        """Adds a message; False when the queue has closed meanwhile. Called in the order of the calls."""
        with self._lock:
            if not self.open:
                return False
            first = not self._inbox and not self._running
            self._inbox.append(op)
            self.touched = time.monotonic()
        if self._driver:
            if (exchange := self._exchange) is not None:
                exchange.interrupt()
        elif first:
            self._have_watched()
        return True

    def _have_watched(self) -> None:
        try:
            _hand_over.watch(self)
        except (OSError, RuntimeError):  # no memory for its thread
            self.hand_over()

    def seal(self) -> None:
        """Takes no more messages, and has the worker run those that are left."""
        with self._lock:
            self._sealed = True
        self.hand_over()

    def hand_over(self) -> None:
        """Has the worker run the messages. If no worker thread can be started, they fail with that error."""
        with self._lock:
            if self._handed or self._closed:
                return
            self._handed = True
            try:
                self._worker.submit(Work("send/recv", 0, True), self._drive_all)
                return
            except Exception as error:
                reason = error
        self._fail(reason)

    def drive_for(self, work: QueuedWork, limit: float) -> None:
        """Runs messages, if no other thread does, until `work` is over or `limit` seconds have passed."""
        if self._driver == threading.get_ident():
            error = NotReadyError(
                "cannot wait here for a message that this very thread has to move first",
                op=work.name,
                seq=work.seq,
                hint="add another callback instead of waiting in one",
            )
            error.amid = True
            raise error
        if limit < _FOREVER and self._exchange is None and not self._worker.is_current():
            self.hand_over()  # opening it may wait for another thread's operation, however long
        if self._handed:
            return
        with self._lock:
            self._waiters += 1
        try:
            if not self._driving.acquire(blocking=False):
                return  # the thread that holds it hands the queue over if it leaves before `work` is over
            try:
                self._drive(work, limit)
            finally:
                self._driving.release()
        finally:
            with self._lock:
                self._waiters -= 1
        if self._waiters:
            self.hand_over()
        elif self.idle:
            self.touched = time.monotonic()
            self._have_watched()

    def _drive_all(self) -> None:
        with self._driving:
            while not self._closed:
                self._drive(None, _FOREVER)

    def _drive(self, until: Work | None, limit: float) -> None:
        end = time.monotonic() + limit
        here = threading.get_ident()
        try:
            self._driver = here
            self._worker.driving.add(here)
            while (until is None or until._pending) and self._take():
                now = time.monotonic()
                if now >= end:
                    return
                exchange = self._opened()
                exchange.due, soonest = min(self._running.items(), key=lambda item: item[1].deadline)
                self._engine.check_broken()
                with self._unobserved():
                    over = exchange.run(max(0.0, soonest.deadline - now), end - now, soonest.timeout)
                for index, peer, error in over:
                    op = self._ending = self._running[index]
                    del self._running[index]
                    op.work.peer = peer
                    if not self._inbox and not self._running:
                        self._close()  # before a waiting thread learns of the end and goes on
                        self._worker.driving.discard(here)  # a callback may wait for what comes next
                    self._finish(op, error)
                    self._ending = None
                    del op  # releases its tensor at once
        except BaseException as error:
            self._worker.driving.discard(here)  # a hook may go on with other ranks
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._worker.driving.discard(here)
            self._driver = 0

    def await_work(self, work: QueuedWork) -> None:
        """To be called by a thread that begins to wait for a message."""
        with self._lock:
            self.awaited.append(work)
            self._attend()

    def leave_work(self, work: QueuedWork) -> None:
        """To be called by a thread that no longer waits for a message."""
        with self._lock:
            self.awaited.remove(work)
            self._attend()

    def _attend(self) -> None:
        if self._exchange is not None:
            self._exchange.attend(bool(self.awaited))

    def _waited_for(self) -> list[int]:
        awaited = self.awaited.copy()
        return [number for number, op in self._running.copy().items() if op.work in awaited]

    def _opened(self) -> Exchange:
        """Returns the exchange; opens it at first, by the thread that runs the messages.

        Whoever posts the first one must not do that: it waits for an operation that runs.
        """
        if self._exchange is None:
            exchange = open_exchange(self._engine.backend)
            exchange.waited_for = self._waited_for
            with self._lock:
                self._exchange = exchange
                self._attend()
                if self._inbox:  # since the last look, and nobody has interrupted what was not there
                    exchange.interrupt()
        return self._exchange

    def _take(self) -> bool:
        """Starts the posted messages. Closes the queue and returns False when none is left."""
        with self._lock:
            new, self._inbox = self._inbox, []
            for op in new:
                self._running[self._added] = op
                self._added += 1
        if new:
            exchange = self._opened()
            for op in new:
                self._start(op)
            with self._unobserved():
                exchange.add([completion.as_sent(self._engine.group, op.calls[0].message) for op in new])
        elif not self._running:
            self._close()
            return not self._closed
        return True

    @staticmethod
    def _unobserved() -> AbstractContextManager[None]:
        """Keeps what the backend uses of torch out of a profiler's events."""
        return contextlib.nullcontext() if profiling.session is None else no_events()

    def _close(self) -> None:
        with self._lock:
            if self._closed or self._inbox or self._running:
                return
            self._closed = True
        self._close_exchange()
        self._engine.fast.unblock()

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange.waited_for = tuple  # it refers to this queue

    def _start(self, op: IssuedOperation) -> None:
        if op.checksum:
            self._engine.checksums.note_inputs(op)
        for record in op.records:
            self._engine.member.recorder.start(record)
        for span in op.spans:
            span.start()
        op.work._start()

    def _finish(self, op: IssuedOperation, error: BaseException | None) -> None:
        engine, work = self._engine, op.work
        if op.calls[0].peer == ANY_RANK and work.peer >= 0:
            number = int(engine.fast.next_pair_seq(work.peer, False))
            for record in op.records:
                engine.member.recorder.set_sender(record, work.peer, number)
        if error is None:
            if op.checksum:
                engine.checksums.note_outputs(op)
            for record in op.records:
                engine.member.recorder.finish(record, recording.COMPLETED, 0)
        else:
            engine.failed(op, error)
        for span in op.spans:
            span.finish(error, work.peer)
        if op.args is not None:
            engine.hooks.finished(op.args, error)
        if error is not None and not isinstance(error, CommError):
            error = engine.broken or error
        work._finish(error)

    def _fail(self, error: BaseException) -> None:
        """Ends all messages with the error that broke the communicator, before anything may overtake them.

        The queue is closed at once: a hook or callback may finalize the communicator, or reconfigure it.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            left = [*self._running.values(), *self._inbox]
            ending, self._ending = self._ending, None
            if ending is not None and ending.work._pending and all(op is not ending for op in left):
                left.insert(0, ending)  # it was interrupted
            self._running, self._inbox = {}, []
        failed: list[BaseException] = []

        def try_to(act: Callable[..., object], *arguments: object) -> None:
            try:
                act(*arguments)
            except BaseException as another:  # of a hook, or another interrupt: all works must end
                failed.append(another)

        if left and interrupts(error):
            try_to(self._engine.backend.abort)  # before others take a closed exchange for a lost rank
        if not closed:
            try_to(self._close_exchange)
        for op in left:
            try_to(self._finish, op, error)
            if op.work._pending:
                try_to(op.work._finish, error)
        if not closed:
            self._engine.fast.unblock()
        if failed:
            raise failed[0]

    def forget(self) -> None:
        """Gives up all messages, in a forked child. Takes no lock."""
        self._closed = True
        for op in [*self._running.values(), *self._inbox]:
            op.work._forget()


class _HandOver:
    """A thread that hands queues to their workers when no thread waits for their messages.

    While messages keep coming it checks once a millisecond, so that posting a message wakes up no thread.
    After some time without messages it sleeps.
    """

    PATIENCE = 50  # checks without a queue before the thread sleeps

    def __init__(self) -> None:
        self._queues: collections.deque[MessageQueue] = collections.deque()
        self._thread: threading.Thread | None = None
        self._asleep = True
        self._wake = threading.Event()
        self._starting = threading.Lock()

    def watch(self, queue: MessageQueue) -> None:
        self._queues.append(queue)
        if self._asleep:
            self._rouse()

    def _rouse(self) -> None:
        with self._starting:  # ranks may be threads that start at the same moment
            if self._thread is None:
                name = "unicomm-messages"
                self._thread = start(threading.Thread(target=self._loop, name=name, daemon=True))
        self._wake.set()

    def _loop(self) -> None:
        idle = 0
        while True:
            if idle > self.PATIENCE:
                self._wake.clear()
                self._asleep = True
                if not self._queues:  # a queue may have come before `_asleep` was visible to its thread
                    self._wake.wait()
                idle = 0
            self._asleep = False
            time.sleep(MessageQueue.GRACE)
            idle = 0 if self._queues else idle + 1
            now = time.monotonic()
            for _ in range(len(self._queues)):
                queue = self._queues.popleft()
                if not queue.idle:
                    continue  # the thread that leaves messages in a queue has it watched again
                if now - queue.touched < MessageQueue.GRACE:
                    self._queues.append(queue)
                else:
                    queue.hand_over()
            queue = None  # type: ignore[assignment]


_hand_over = _HandOver()


def _forget_after_fork() -> None:
    global _hand_over
    _hand_over = _HandOver()  # the parent's thread and queues are not here


os.register_at_fork(after_in_child=_forget_after_fork)
