"""Engine: how an operation of a communicator runs, from checked arguments to its Work.

    check -> (pre-hooks) -> order, seq and record -> run here or in the worker -> (post-hooks)

A synchronous operation runs in the caller's thread; an asynchronous one, or one behind an asynchronous
one, in the communicator's worker. Either way operations run one at a time in the order of their calls.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from unicomm.comms.backend import Backend, HasFastPath, PreparesOperations, UsesStreams
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    UnsupportedError,
)
from unicomm.comms.execution.device.fast import StreamFast
from unicomm.comms.execution.device.queue import StreamQueue
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Call, Message, OpArgs
from unicomm.comms.operations.check import Checker
from unicomm.comms.options import Hints, Timeout, seconds
from unicomm.comms.work import Work, Worker

from . import completion, point_to_point
from .device import graphs
from .fast_path import NoFastPath
from .hooks import Hooks, next_op_id
from .in_order import InOrder
from .member import Member
from .message_queue import ANY_RANK, Lane, Posted
from .point_to_point import NO_SPANS
from .profiling import events as profiling
from .streams import device_streams

if TYPE_CHECKING:
    from unicomm.comms.execution.profiling.session import Described, Span
    from unicomm.comms.memory.symmetric import SymmetricMemory

T = TypeVar("T")

# Errors that leave the ranks in step and the communicator usable.
_HARMLESS = (MismatchError, InvalidArgumentError, UnsupportedError, NotReadyError)


class Engine:
    """The part of a `Communicator` that runs operations."""

    def __init__(self, member: Member, hooks: Hooks | None = None, vacant: CommError | None = None) -> None:
        """`hooks`: of the communicator's epoch before. `vacant`: without ranks, all operations raise that."""
        self.member = member
        self.rank = member.rank
        self.name = member.name
        self.timeout = member.options.timeout
        self.backend = member.backend
        self.group = completion.Group(member.backend, member.rank, member.size)
        moves = member.backend.capabilities.moves_data
        self.check = Checker(member.name, member.rank, member.size, member.device, moves)
        backend = member.backend
        fast = None
        if isinstance(backend, HasFastPath):
            fast = backend.fast_path(member.recorder, member.recorder_index, self.timeout)
        self.fast = fast or NoFastPath()
        if hooks is None:
            hooks = Hooks(self._hooks_changed)
        else:
            hooks.move(self._hooks_changed)
        self.hooks = hooks
        self.worker = Worker(f"unicomm-{member.name}")
        streams = backend.streams() if isinstance(backend, UsesStreams) else None
        self.queue = None if streams is None else StreamQueue(self, streams)
        self._streams = streams if vacant is None else device_streams(member.asked_for, member.device)
        if self.queue is not None and fast is None:
            self.fast = StreamFast(self)
        self.finalized = False
        self.closing = False
        self._refuses_graphs = not member.backend.capabilities.captured
        self.finalizing = threading.RLock()
        self.closed_because = "the communicator is finalized"
        self.broken: CommError | None = None
        self.vacant = vacant
        self._recorder = member.recorder
        self._recorder_index = member.recorder_index
        self._order = threading.RLock()  # held while an operation is issued: gives the order
        self._break_lock = threading.Lock()
        self.ended = threading.Event()  # clear while another thread breaks it
        self.ended.set()
        self.lane: Lane | None = None
        self.symmetric: SymmetricMemory | None = None
        if vacant is None:
            profiling.register(self)

    def _in_order(self) -> InOrder:
        return InOrder(self)

    def seal_lane(self) -> None:
        """Has the messages of the lane, if there are any, run before what comes next."""
        if (lane := self.lane) is not None:
            self.lane = None
            lane.seal()

    def submit(self, work: Work, job: Callable[[], None]) -> None:
        self.fast.block()  # until it is over: what comes later must not overtake it

        def run() -> None:
            try:
                job()
            finally:
                self.fast.unblock()

        self.worker.submit(work, run)

    def _hooks_changed(self, active: bool) -> None:
        if active:
            self.fast.block()
        else:
            self.fast.unblock()

    def fast_failed(self, name: str, result: tuple[int, Any]) -> NoReturn:
        """Raises the error that a fast path returned."""
        seq, fault = result

        def fail() -> None:
            assert isinstance(self.backend, HasFastPath)
            self.backend.raise_fault(fault, self.timeout)

        self._execute(fail, name, seq, [], False, None)
        raise AssertionError("raise_fault returned")

    def refuse(
        self, op: str, message: str, hint: str = "`unicomm doctor` shows what each backend can do"
    ) -> NoReturn:
        raise UnsupportedError(message, op=op, comm=self.name, rank=self.rank, hint=hint)

    def retire(self, reason: CommError) -> None:
        """The communicator goes on with another engine: who comes here late gets `reason`."""
        self.vacant = reason
        self.finalized = self.closing = True
        self.symmetric = None
        self.fast.block()

    def let_go(self, nothing: Backend) -> None:
        """Drops what it holds of the backend and its store.

        An error that somebody keeps holds this engine by its traceback, and the engine holds the error.
        """
        self.backend = self.member.backend = nothing
        self.group = completion.Group(nothing, self.rank, self.group.size)
        self.member.store = None

    @contextlib.contextmanager
    def quiet(self, seconds: float) -> Iterator[bool]:
        """Whether no operation runs in any other thread's call; waits for that, and keeps new ones out."""
        free = self._order.acquire(timeout=seconds)
        try:
            yield free
        finally:
            if free:
                self._order.release()

    def check_open(self, op: str) -> None:
        if self.vacant is not None:
            error = self.vacant.again(self.vacant.message)
            error.op = op
            raise error
        if self.finalized:
            raise NotReadyError(
                self.closed_because,
                op=op,
                comm=self.name,
                rank=self.rank,
                hint="create a new one with unicomm.new_comm",
            )
        self.check_broken()

    def check_broken(self) -> None:
        if self.broken is not None:
            message = self.broken.message
            if not message.startswith("broken earlier"):
                message = f"broken earlier: {message}"
            raise self.broken.again(message)

    def check_capture(self, op: str) -> None:
        """Before anything of an operation is counted, recorded, or put on a stream that is captured."""
        if self._refuses_graphs and self._streams is not None and self._streams.is_capturing():
            self.refuse(
                op,
                f"operations of backend '{self.backend.name}' cannot be captured in a graph",
                "leave them out of the captured part; those of unicomm.symm, nccl and rccl can be captured",
            )

    def refuse_capture(self, op: str) -> None:
        """Before anything of a call that happens once; see `graphs.refuse_capture`."""
        graphs.refuse_capture(self._streams, op, self.name, self.rank)

    def per_op(self, op: str, hints: Hints, timeout: Timeout) -> float:
        if hints:
            backend = self.backend.name
            self.refuse(op, f"backend '{backend}' takes no hints for one operation: {hints!r}")
        return self.timeout if timeout is None else self.read_timeout(op, timeout)

    def read_timeout(self, op: str, timeout: Timeout) -> float:
        with self.located(op):
            return seconds(timeout, self.timeout)

    @contextlib.contextmanager
    def located(self, op: str) -> Iterator[None]:
        """Errors from within say which operation of which communicator they are about."""
        try:
            yield
        except CommError as error:
            error.op = error.op or op
            error.comm = error.comm or self.name
            error.rank = self.rank if error.rank is None else error.rank
            raise

    def check_can_wait(self, op: str) -> None:
        if self.worker.busy and self.worker.is_current():
            raise NotReadyError(
                "cannot wait here for operations that this very thread has to run first",
                op=op,
                comm=self.name,
                rank=self.rank,
                hint="a callback of a Work may issue operations with async_op=True only",
            )

    def collective(
        self,
        name: str,
        tensors: Sequence[Any],
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
        prepared: object = None,
        **arguments: Any,
    ) -> Work:
        self.check_open(name)
        self.check_capture(name)
        call = self.check.call(name, tensors, **arguments)
        if prepared is not None:
            call.prepared, call.extra = prepared, 1  # all ranks have to
        call.timeout = self.per_op(name, hints, timeout)
        call.async_op = bool(async_op)
        return self._issue(call)

    def release(self, handle: object) -> None:
        """Has the backend forget a persistent operation, after the operations that were issued before."""
        with self._in_order():
            backend = self.backend
            if not isinstance(backend, PreparesOperations):
                return
            if self.worker.busy:
                self.submit(Work("free", 0, True), lambda: backend.unprepare(handle))
            elif not self.finalized:
                backend.unprepare(handle)

    def _issue(self, call: Call) -> Work:
        with self._in_order():
            self.check_open(call.name)
            if not call.async_op:
                self.check_can_wait(call.name)
            call.op_id = next_op_id()
            call.seq = self.fast.seq + 1
            args = OpArgs.of(call) if self.hooks.active else None
            if args is not None:
                self.hooks.before(args)
            queue = self.queue
            # After the hooks, which may issue operations.
            pending = queue is None and (call.async_op or self.worker.busy)
            call.seq = self.fast.next_seq()
            if args is not None and args.seq != call.seq:
                args = OpArgs.of(call)
            record = self._recorder.begin(
                self._recorder_index,
                call.operation.code,
                call.seq,
                call.op_id,
                call.inputs,
                call.outputs,
                call.red_code,
                call.root,
                recording.ASYNC if call.async_op else 0,
                0,
                min(int(call.timeout * 1000), recording.MOST_MS),
                0,
                not pending and queue is None,
            )

            def run() -> None:
                call.start_clock()
                completion.collective(self.group, call)

            job, spans = run, NO_SPANS
            if profiling.session is not None:
                job, spans = profiling.collective(self, call, pending, run)
            tensors = (*call.inputs, *call.outputs)
            work = self._run(
                *(job, call.name, call.seq, [record], pending, call.async_op, call.timeout, args, tensors),
                spans=spans,
                about=lambda: [profiling.of_call(call)],
            )
        if not call.async_op and (pending or call.name == "barrier"):
            work.wait()
        if args is not None:
            self.hooks.after(args)
        return work

    def messages(
        self,
        items: Sequence[tuple[str, Any, Any]],
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
        batch: bool = False,
    ) -> Work:
        """Sends and receives, together: `items` are (send or recv, tensor, peer)."""
        return point_to_point.messages(self, items, async_op, hints, timeout, batch)

    def post(self, kind: str, tensor: Any, peer: Any, timeout: Timeout) -> Work:
        """A send or receive that runs beside its neighbours; the peer of a receive may be `ANY_RANK`."""
        return point_to_point.post(self, kind, tensor, peer, timeout)

    def hooked(self, args: OpArgs, run: Callable[[], T]) -> T:
        """Runs something that is no operation of the backend, with the hooks around it."""
        if not self.hooks.active:
            return run()
        self.hooks.before(args)
        error: BaseException | None = None
        try:
            result = run()
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.hooks.finished(args, error)
        self.hooks.after(args)
        return result

    def started(self, posted: Posted) -> None:
        """Called by the lane when a message sets out."""
        self._recorder.start(posted.record)
        if posted.span is not None:
            posted.span.start()
        posted.work._start()

    def finished(self, posted: Posted, error: BaseException | None) -> None:
        """Called by the lane when a message is over."""
        work = posted.work
        if posted.message.peer == ANY_RANK and work.peer >= 0:
            point_to_point.next_of_pair(self, Message(False, work.peer, posted.message.tensor))
        if error is None:
            self._recorder.finish(posted.record, recording.COMPLETED, 0)
        else:
            self._failed(error, work.name, work.seq, [posted.record])
        if posted.span is not None:
            posted.span.finish(error, work.peer)
        if posted.args is not None:
            self.hooks.finished(posted.args, error)

    def _execute(
        self,
        run: Callable[[], None],
        op: str,
        seq: int,
        records: Sequence[int],
        queued: bool,
        args: OpArgs | None,
    ) -> None:
        """Runs an operation in the current thread, with its records; completes the error it may raise."""
        recorder = self._recorder
        if queued:
            for record in records:
                recorder.start(record)
        error: BaseException | None = None
        try:
            self.check_broken()
            run()
        except BaseException as caught:
            error = caught
            self._failed(caught, op, seq, records)
            raise
        else:
            for record in records:
                recorder.finish(record, recording.COMPLETED, 0)
        finally:
            if args is not None:
                self.hooks.finished(args, error)

    def _run(
        self,
        job: Callable[[], None],
        op: str,
        seq: int,
        records: Sequence[int],
        pending: bool,
        async_op: bool,
        timeout: float,
        args: OpArgs | None,
        tensors: Sequence[Any],
        messages: Sequence[tuple[bool, int, int]] = (),
        spans: Sequence[Span] = NO_SPANS,
        about: Callable[[], Sequence[Described]] = tuple,
    ) -> Work:
        """Runs an operation here, or has it run by the worker (`pending`) or on a stream."""
        if self.queue is not None:
            try:
                self.check_broken()
                held = tensors if async_op or not self.queue.streams.frees_in_order else ()
                return self.queue.issue(
                    *(job, op, seq, records, timeout, async_op, args, held, messages, spans, about)
                )
            except BaseException as caught:
                self._failed(caught, op, seq, records)
                if args is not None:
                    self.hooks.finished(args, caught)
                raise
        work = Work(op, seq, pending)
        if pending:
            self.submit(work, lambda: self._execute(job, op, seq, records, True, args))
        else:
            self._execute(job, op, seq, records, False, args)
        return work

    def late_failure(self, error: BaseException, op: str, seq: int, records: Sequence[int]) -> None:
        """An operation on the device failed, and with it the communicator."""
        self._failed(error, op, seq, records)
        self.backend.abort()

    def _failed(self, error: BaseException, op: str, seq: int, records: Sequence[int]) -> None:
        """Completes the error of an operation, records it, and breaks the communicator where it has to."""
        if isinstance(error, CommTimeoutError) and error.comm is None:  # else it has been here
            from unicomm.comms.failures.missing_ranks import explain

            explain(error, self.member.uid)  # while the records still say what is pending
        code = recording.error_code(error)
        for record in records:
            self._recorder.finish(record, recording.FAILED, code)
        if isinstance(error, CommError):
            error.op = error.op or op
            error.seq = seq if error.seq is None else error.seq
            error.comm = error.comm or self.name
            error.rank = self.rank if error.rank is None else error.rank
            if not isinstance(error, _HARMLESS):
                self.break_(error)
            return
        # Nobody knows how far it came, so the ranks are out of step: going on could match the wrong
        # messages, which some libraries answer by ending the process.
        broken = BackendError(
            f"{type(error).__name__} in the middle of an operation: {error}",
            op=op,
            comm=self.name,
            seq=seq,
            rank=self.rank,
            hint="create a new communicator to go on; unless you interrupted it, please report this",
        )
        self.break_(broken, self.backend.abort)

    def break_(self, error: CommError, end: Callable[[], None] = lambda: None) -> None:
        """Marks the communicator as broken; the first error also runs `end` and then the abort hooks."""
        with self._break_lock:
            if self.broken is not None:
                return
            self.ended.clear()
            self.broken = error
        try:
            self.fast.block()
            if self.queue is not None:
                self.queue.lookout.ended(error)
            end()
            if self.symmetric is not None:
                self.symmetric.abort()
        finally:
            self.ended.set()
        self._recorder.set_comm_state(self._recorder_index, recording.BROKEN)
        self.hooks.broken(error)
        options = self.member.options
        if options.enable_reconfigure:  # other ranks go on with this one, as in torchcomms
            return
        if options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            print(f"unicomm: ending the process, as asked for: {error}", file=sys.stderr, flush=True)
            os.abort()
