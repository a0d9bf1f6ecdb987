"""Lane: the messages of a process group, which run side by side and finish one by one.

torch.distributed lets a program start any number of isend and irecv and wait for them in any order, so one
that waits for its peer must not hold up the next. Sends and receives that are called with no other operation
between them form a lane: they join it also while the first are under way. Another operation of the
communicator seals the lane and runs after it.

Nothing runs at first. Whoever waits for one of the messages runs the lane meanwhile, so that a blocking
send or receive costs no switch of threads. If nobody waits, the communicator's worker takes over after a
millisecond.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from unicomm.comms.backend import open_exchange
from unicomm.comms.errors import CommError, NotReadyError
from unicomm.comms.execution.profiling.session import Span
from unicomm.comms.operations.call import Message, OpArgs
from unicomm.comms.options import seconds
from unicomm.comms.work import Work, Worker

from . import completion

if TYPE_CHECKING:
    from .engine import Engine

ANY_RANK = -1  # as the peer of a receive
_FOREVER = 1e12


class LaneWork(Work):
    """The handle of one message of a lane. `peer`: the other rank, once it is over."""

    __slots__ = ("_lane", "peer")

    def __init__(self, name: str, seq: int, lane: Lane, worker: Worker) -> None:
        super().__init__(name, seq, True)
        self._lane = lane
        self._worker = worker
        self.peer = ANY_RANK

    def wait(self, timeout: timedelta | float | None = None) -> None:
        if self._pending:
            limit = seconds(timeout, _FOREVER)
            end = time.monotonic() + limit
            self._lane.drive_for(self, limit)
            if self._pending and timeout is not None:
                timeout = max(1e-9, end - time.monotonic())
        super().wait(timeout)

    def is_completed(self) -> bool:
        if self._pending:
            self._lane.hand_over()
        return not self._pending


@dataclass(slots=True)
class Posted:
    """A message of a lane on its way."""

    message: Message
    work: LaneWork
    record: int
    args: OpArgs | None
    deadline: float
    span: Span | None = None


class Lane:
    GRACE = 0.001  # seconds after the last call until the worker takes over

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._exchange = open_exchange(engine.backend)
        self._lock = threading.Lock()
        self._driving = threading.Lock()  # held by the thread that runs the messages
        self._driver = 0
        self._inbox: list[Posted] = []
        self._running: dict[int, Posted] = {}
        self._added = 0
        self._waiters = 0
        self._sealed = False
        self._handed = False
        self._closed = False
        self.touched = time.monotonic()
        engine.fast.block()  # until the lane is closed: what comes later must not overtake it

    @property
    def open(self) -> bool:
        """Whether a message may join."""
        return not (self._sealed or self._closed)

    @property
    def idle(self) -> bool:
        """Whether there are messages and nobody runs them or is going to."""
        return not (self._handed or self._closed or self._driver)

    def post(self, posted: Posted) -> bool:
        """Adds a message; False when the lane has closed meanwhile. Called in the order of the calls."""
        with self._lock:
            if not self.open:
                return False
            first = not self._inbox and not self._running
            self._inbox.append(posted)
            self.touched = time.monotonic()
        if self._driver:
            self._exchange.interrupt()
        elif first:
            _watcher.watch(self)
        return True

    def seal(self) -> None:
        """Nothing joins any more; the worker runs what is left."""
        with self._lock:
            self._sealed = True
        self.hand_over()

    def hand_over(self) -> None:
        """Has the worker run the messages; where it cannot, for want of a thread, say, they fail of that."""
        with self._lock:
            if self._handed or self._closed:
                return
            self._handed = True
            try:
                self._engine.submit(Work("send/recv", 0, True), self._drive_all)
                return
            except Exception as error:
                reason = error
        self._fail(reason)

    def drive_for(self, work: LaneWork, limit: float) -> None:
        """Runs messages until `work` is over or `limit` seconds have passed, unless another thread does."""
        if self._driver == threading.get_ident():
            raise NotReadyError(
                "cannot wait here for a message that this very thread has to move first",
                op=work.name,
                seq=work.seq,
                hint="add another callback instead of waiting in one",
            )
        if self._handed:
            return
        with self._lock:
            self._waiters += 1
        try:
            if not self._driving.acquire(blocking=False):
                return  # then whoever holds it hands over when it leaves, if it does not finish `work`
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
            _watcher.watch(self)

    def _drive_all(self) -> None:
        with self._driving:
            while not self._closed:
                self._drive(None, _FOREVER)

    def _drive(self, until: Work | None, limit: float) -> None:
        end = time.monotonic() + limit
        self._driver = threading.get_ident()
        try:
            while (until is None or until._pending) and self._take():
                now = time.monotonic()
                if now >= end:
                    return
                soonest = min(p.deadline for p in self._running.values())
                self._engine.check_broken()
                for index, peer, error in self._exchange.run(max(0.0, soonest - now), end - now):
                    posted = self._running.pop(index)
                    posted.work.peer = peer
                    if not self._inbox and not self._running:
                        self._close()  # before anybody learns that it is over and goes on
                    self._finish(posted, error)
                    del posted  # its tensor is released as soon as it is over
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._driver = 0

    def _take(self) -> bool:
        """Starts what was posted; False when nothing is left, and then the lane is closed."""
        with self._lock:
            new, self._inbox = self._inbox, []
            for posted in new:
                self._running[self._added] = posted
                self._added += 1
        if new:
            for posted in new:
                self._engine.started(posted)
            self._exchange.add([completion.as_sent(self._engine.group, p.message) for p in new])
        elif not self._running:
            self._close()
            return not self._closed
        return True

    def _close(self) -> None:
        with self._lock:
            if self._closed or self._inbox or self._running:
                return
            self._closed = True
        self._exchange.close()
        self._engine.fast.unblock()

    def _finish(self, posted: Posted, error: BaseException | None) -> None:
        self._engine.finished(posted, error)
        if error is not None and not isinstance(error, CommError):
            error = self._engine.broken or error
        posted.work._finish(error)

    def _fail(self, error: BaseException) -> None:
        """What ends one message of a broken communicator ends all."""
        with self._lock:
            left = [*self._running.values(), *self._inbox]
            self._running, self._inbox = {}, []
        self._close()
        for posted in left:
            self._finish(posted, error)

    def forget(self) -> None:
        """In a forked child, where nothing of this can go on. Takes no lock."""
        self._closed = True
        for posted in [*self._running.values(), *self._inbox]:
            posted.work._forget()


class _Watcher:
    """A thread that hands over the lanes that nobody waits for.

    While there are messages now and then it looks once a millisecond, so that whoever posts one has no
    thread to wake up; after some time without any it sleeps.
    """

    PATIENCE = 50  # looks without a lane before it sleeps

    def __init__(self) -> None:
        self._lanes: collections.deque[Lane] = collections.deque()
        self._thread: threading.Thread | None = None
        self._asleep = True
        self._wake = threading.Event()
        self._starting = threading.Lock()

    def watch(self, lane: Lane) -> None:
        self._lanes.append(lane)
        if self._asleep:
            self._rouse()

    def _rouse(self) -> None:
        with self._starting:  # ranks may be threads that begin at the same moment
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="unicomm-messages", daemon=True)
                self._thread.start()
        self._wake.set()

    def _loop(self) -> None:
        idle = 0
        while True:
            if idle > self.PATIENCE:
                self._wake.clear()
                self._asleep = True
                if not self._lanes:  # else one came before it could see that it has to wake this thread
                    self._wake.wait()
                idle = 0
            self._asleep = False
            time.sleep(Lane.GRACE)
            idle = 0 if self._lanes else idle + 1
            now = time.monotonic()
            for _ in range(len(self._lanes)):
                lane = self._lanes.popleft()
                if not lane.idle:
                    continue  # whoever leaves it with messages in it has it watched again
                if now - lane.touched < Lane.GRACE:
                    self._lanes.append(lane)
                else:
                    lane.hand_over()
            lane = None  # type: ignore[assignment]


_watcher = _Watcher()


def _forget_after_fork() -> None:
    global _watcher
    _watcher = _Watcher()  # the parent's thread is not here, nor are its lanes


os.register_at_fork(after_in_child=_forget_after_fork)
