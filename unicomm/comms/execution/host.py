"""The host executor: operations that block a thread until they are over.

A synchronous operation runs in the caller's thread. An asynchronous one, and every one issued while another
is pending, runs in the communicator's worker. Messages of a process group run side by side
(message_queue.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from unicomm.comms.errors import CommError, NotReadyError
from unicomm.comms.operations import recording
from unicomm.comms.streams import Streams
from unicomm.comms.work import Work

from .issued import IssuedOperation
from .message_queue import MessageQueue, Posted, QueuedWork
from .owner import Owner
from .profiling import events as profiling
from .worker import Worker


class HostExecutor:
    """Runs the operations of one communicator; see `owner.Executor` for its methods."""

    streams: Streams | None = None

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._recorder = owner.member.recorder
        self.worker = Worker(f"unicomm-{owner.member.name}")
        self.messages: MessageQueue | None = None  # the one that is open, or was last

    def run(self, op: IssuedOperation) -> Work:
        if op.queued:
            return self._post(op)
        later = op.async_op or self.worker.busy
        op.begin(self._owner.member, not later)
        if profiling.session is not None:
            profiling.issued(self._owner, op, here=not later)
        work = Work(op.name, op.seq, later)
        if later:
            self._submit(work, lambda: self._carry_out(op, True))
        else:
            self._carry_out(op, False)
        return work

    def settle(self, op: IssuedOperation, work: Work) -> None:
        if work._pending and not op.async_op:
            work.wait()

    def _carry_out(self, op: IssuedOperation, later: bool) -> None:
        """Runs an operation in the current thread, and ends its records, rows and hooks."""
        owner, recorder = self._owner, self._recorder
        if later:
            for record in op.records:
                recorder.start(record)
        for span in op.spans:
            span.begin(later)
        error: BaseException | None = None
        try:
            owner.check_broken()
            assert op.run is not None
            op.run()
        except BaseException as caught:
            error = caught
            owner.failed(op, caught)
            raise
        else:
            for record in op.records:
                recorder.finish(record, recording.COMPLETED, 0)
        finally:
            for span in reversed(op.spans):
                span.end(error)
            if op.args is not None:
                owner.hooks.finished(op.args, error)

    def _submit(self, work: Work, job: Callable[[], None]) -> None:
        fast = self._owner.fast
        fast.block()  # until the job is over: a later operation must not overtake it

        def run() -> None:
            try:
                job()
            finally:
                self._owner.fast.unblock()

        self.worker.submit(work, run)

    def run_after_pending(self, job: Callable[[], None]) -> None:
        if self.worker.busy:
            self._submit(Work("free", 0, True), job)
        else:
            job()

    # --- queued messages --------------------------------------------------------------------------------

    def _post(self, op: IssuedOperation) -> Work:
        op.begin(self._owner.member, False)
        span = None
        if profiling.session is not None:
            profiling.issued(self._owner, op, here=False)
            span = op.spans[0]
        op.deadline = time.monotonic() + op.timeout
        while True:
            queue = self.messages
            if queue is None or not queue.open:
                queue = self.messages = MessageQueue(self._owner, self._submit)
            work = QueuedWork(op.name, op.seq, queue, self.worker)
            if queue.post(Posted(op, work, span)):
                break
        if self.worker.busy:  # with operations that have to run before
            queue.hand_over()
        return work

    def seal(self) -> None:
        if (queue := self.messages) is not None:
            self.messages = None
            queue.seal()

    # --- waiting and the end ------------------------------------------------------------------------------

    def check_can_wait(self, op: str) -> None:
        if self.worker.busy and self.worker.is_current():
            raise NotReadyError(
                "cannot wait here for operations that this very thread has to run first",
                op=op,
                comm=self._owner.name,
                rank=self._owner.rank,
                hint="a callback of a Work may issue operations with async_op=True only",
            )

    def broke(self, error: CommError) -> None:
        """Nothing to do: pending operations find the error when the worker comes to them."""

    def last(self) -> None:
        return None

    def follow_last(self) -> None:
        """Nothing to do: operations block the host."""

    @property
    def thread(self) -> int:
        return self.worker.ident

    @property
    def unattended(self) -> bool:
        return self.messages is not None and self.messages.unattended

    @property
    def busy(self) -> bool:
        return self.worker.busy

    def pending(self) -> Sequence[Work]:
        return self.worker.pending()

    def is_current(self) -> bool:
        return self.worker.is_current()

    def drain(self, timeout: float) -> bool:
        return self.worker.drain(timeout)

    def catch_up(self) -> None:
        """Nothing to do: the thread that runs an operation notes its end."""

    def close(self, timeout: float) -> bool:
        return self.worker.close(timeout)

    def forget(self) -> None:
        self.worker.forget()
        if self.messages is not None:
            self.messages.forget()
