"""The host executor: operations that block a thread until they are over.

A synchronous operation runs in the caller's thread. An asynchronous one, and every one issued while another
is pending, runs in the communicator's worker. Messages of a process group run side by side
(message_queue.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from unicomm.c10d.compat import no_events
from unicomm.comms.errors import NotReadyError
from unicomm.comms.operations import recording
from unicomm.comms.operations.table import BY_CODE
from unicomm.comms.work import Work

from .engine import Engine
from .executor import Executor
from .issued import IssuedOperation
from .message_queue import MessageQueue, QueuedWork
from .profiling import events as profiling
from .worker import Worker


def on_fast_path(engine: Engine, here: bool = False) -> list[str]:
    """Returns the operations that threads run on the fast path now; with `here` only those of this thread."""
    return [BY_CODE[op].name + (f" #{seq}" if seq else "") for op, seq in engine.fast.running(here)]


class HostExecutor(Worker, Executor):
    """Runs the operations of one communicator, in the caller's thread or as the worker that it is."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(f"unicomm-{engine.name}")
        self._engine = engine
        self._recorder = engine.member.recorder
        self.messages: MessageQueue | None = None  # the one that is open, or was last
        self._running: tuple[int, IssuedOperation] | None = None  # with the thread that runs it

    def run(self, op: IssuedOperation) -> Work:
        if op.queued:
            return self._post(op)
        later = op.async_op or self.busy
        op.begin(self._engine.member, not later)
        if profiling.session is not None:
            profiling.issued(self._engine, op, here=not later)
        work = Work(op.name, op.seq, later)
        if later:
            try:
                self.submit(work, lambda: self._carry_out(op, True))
            except (OSError, RuntimeError) as error:  # no memory for a thread, but the number is taken
                self._engine.failed(op, error)
                raise
        else:
            self._carry_out(op, False)
        return work

    def settle(self, op: IssuedOperation, work: Work) -> None:
        if not op.async_op:
            work.wait()  # also if the worker has ended it by now: this raises its error

    def _carry_out(self, op: IssuedOperation, later: bool) -> None:
        """Runs an operation in the current thread, and ends its records, rows and hooks."""
        engine, recorder = self._engine, self._recorder
        if later:
            for record in op.records:
                recorder.start(record)
        for span in op.spans:
            span.begin(later)
        error: BaseException | None = None
        try:
            engine.check_broken()
            assert op.run is not None
            outer, self._running = self._running, (threading.get_ident(), op)
            try:
                run = partial(engine.checksums.run, op) if op.checksum else op.run
                if op.spans:
                    with no_events():  # of what the backend uses of torch
                        run()
                else:
                    run()
            finally:
                self._running = outer
        except BaseException as caught:
            error = caught
            engine.failed(op, caught)
            raise
        else:
            for record in op.records:
                recorder.finish(record, recording.COMPLETED, 0)
        finally:
            for record, call in zip(op.records, op.calls, strict=False):
                if call.wire is not None:
                    recorder.add_sent(record, call.wire.sent)
            for span, call in zip(reversed(op.spans), reversed(op.calls), strict=False):
                span.end(error, 0 if call.wire is None else call.wire.sent)
            if op.args is not None:
                engine.hooks.finished(op.args, error)

    def submit(self, work: Work, job: Callable[[], None]) -> None:
        self._engine.fast.block()  # until the job is over: a later operation must not overtake it

        def run() -> None:
            try:
                job()
            finally:
                self._engine.fast.unblock()

        try:
            super().submit(work, run)
        except BaseException:
            self._engine.fast.unblock()
            raise

    def run_after_pending(self, job: Callable[[], None]) -> None:
        if self.busy:
            self.submit(Work("free", 0, True), job)
        else:
            job()

    # --- queued messages --------------------------------------------------------------------------------

    def _post(self, op: IssuedOperation) -> Work:
        op.begin(self._engine.member, False)
        if profiling.session is not None:
            profiling.issued(self._engine, op, here=False)
        op.deadline = time.monotonic() + op.timeout
        while True:
            queue = self.messages
            if queue is None or not queue.open:
                queue = self.messages = MessageQueue(self._engine, self)
            op.work = work = QueuedWork(op.name, op.seq, queue, self)
            if queue.post(op):
                break
        if self.busy:  # with operations that have to run before
            queue.hand_over()
        return work

    def seal(self) -> None:
        if (queue := self.messages) is not None:
            self.messages = None
            queue.seal()

    # --- waiting and the end ------------------------------------------------------------------------------

    def check_can_issue(self, op: IssuedOperation) -> None:
        super().check_can_issue(op)
        if op.async_op and (
            first := self._interrupted()
        ):  # not even behind it: the worker would begin beside it
            raise self._amid_error(op.name, first)

    def check_can_wait(self, op: str) -> None:
        if self.busy and self.is_current():
            raise self._engine.error(
                NotReadyError,
                op,
                "cannot wait here for operations that this very thread has to run first",
                "a callback of a Work may issue operations with async_op=True only",
            )
        if first := "" if self.is_current() else self.amid():
            raise self._amid_error(op, first)

    def check_can_close(self) -> None:
        if first := self._interrupted():
            self._engine.refuse_to_end(first)

    def amid(self) -> str:
        return super().amid() or self._interrupted()

    def _interrupted(self) -> str:
        """The operation of the caller's thread that a signal handler has interrupted; "" if there is none."""
        if here := on_fast_path(self._engine, here=True):
            return here[0]
        if (running := self._running) is not None and running[0] == threading.get_ident():
            return f"{running[1].name} #{running[1].seq}"
        return ""

    def _amid_error(self, op: str, first: str) -> NotReadyError:
        error = self._engine.error(
            NotReadyError,
            op,
            f"called in the midst of {first}, which this very thread runs: none of the two could end",
            "a signal handler sets a flag, and the program communicates when the operation has returned",
        )
        error.amid = True
        return error

    @property
    def running(self) -> IssuedOperation | None:
        return None if (running := self._running) is None else running[1]

    @property
    def unattended(self) -> bool:
        return self.messages is not None and self.messages.unattended

    def forget(self) -> None:
        super().forget()
        if self.messages is not None:
            self.messages.forget()
