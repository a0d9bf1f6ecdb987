"""Engine: how the operations of a communicator run, from checked arguments to a Work.

    check -> issue: order, pre-hooks, number -> executor: records, event, run -> post-hooks

Each operation becomes one `IssuedOperation`, which an executor runs: on the host (host.py), where a
synchronous operation runs in the caller's thread, or on a device's streams (device/executor.py). Operations
run one at a time in the order of their calls.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from unicomm import _core
from unicomm.comms.backend import Backend, HasFastPath, PreparesOperations, device_streams, streams_of
from unicomm.comms.errors import (
    AbortedError,
    BackendError,
    CommError,
    CommTimeoutError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
    SilentCorruptionError,
    UnsupportedError,
)
from unicomm.comms.failures import faults
from unicomm.comms.failures.missing_ranks import explain
from unicomm.comms.operations import arrays, recording, reproducible, wire
from unicomm.comms.operations.call import CHECKED, Call, OpArgs
from unicomm.comms.operations.check import Checker
from unicomm.comms.operations.reduction import ReproducibleOp
from unicomm.comms.options import CHECKSUM, Hints, Timeout, copy_hints, parse_bool, read_hints, seconds
from unicomm.comms.work import Work
from unicomm.flight_recorder.recording import ending

from .composed import completion
from .composed.checksums import Checksums
from .device import graphs
from .executor import Executor, SymmetricHeap
from .fast_path import NoFastPath
from .hooks import Hooks, next_op_id
from .issued import IssuedOperation
from .member import Member
from .worker import wait_awake

T = TypeVar("T")
E = TypeVar("E", bound=CommError)

_LOOK = 0.001  # seconds between two looks at the fast path

# Errors that leave the ranks in step and the communicator usable.
_HARMLESS = (MismatchError, InvalidArgumentError, UnsupportedError, NotReadyError, SilentCorruptionError)


class Engine:
    """The part of a `Communicator` that runs operations.

    Attributes:
        fast: the native or short path for common operations, which also numbers all operations.
        single: the native path of a process group's messages that need not wait, or None.
        executor: runs the issued operations.
        order: held while an operation is issued.
        checksums: of the operations that ask for them.
        checked: whether that is all of them, unless a call says otherwise.
        timeout: seconds that an operation may take unless its call says otherwise.
        broken: the error that broke the communicator, None while it is usable.
        vacant: the error that operations raise while the communicator has no ranks.
        symmetric: the communicator's symmetric memory, once it has been connected.
    """

    def __init__(
        self,
        member: Member,
        hooks: Hooks | None = None,
        vacant: CommError | None = None,
    ) -> None:
        """See `assembly.new_engine`, which also gives it the executor."""
        self.member = member
        self.rank = member.rank
        self.name = member.name
        self.timeout = member.options.timeout
        self.backend = member.backend
        self.group = completion.Group(member.backend, member.rank, member.size)
        moves = member.backend.capabilities.moves_data
        self.check = Checker(member.name, member.rank, member.size, member.device, moves)
        native, backend = None, member.backend
        if isinstance(backend, HasFastPath):
            native = backend.fast_path(member.recorder, member.recorder_index, self.timeout)
        self.has_native_path = bool(native)
        self.fast: Any = native or NoFastPath()
        self.single = _core.single_messages(native)
        if hooks is None:
            hooks = Hooks(self._hooks_changed)
        else:
            hooks.move(self._hooks_changed)
        self.hooks = hooks
        self.finalized = False
        self.closing = False
        self.finalizing = threading.RLock()
        self.inherited = False  # by a fork: it belongs to the parent; memory of the process is still there
        self.closed_because = "the communicator is finalized"
        self.broken: CommError | None = None
        self.vacant = vacant
        self.order = threading.RLock()
        self.issuer = 0  # the thread that issues an operation, as `threading.get_ident` returns it
        self._break_lock = threading.Lock()
        self.ended = threading.Event()  # clear while another thread breaks it
        self.ended.set()
        self.symmetric: SymmetricHeap | None = None
        self.executor: Executor
        self._streams = (
            streams_of(backend) if vacant is None else device_streams(member.asked_for, member.device)
        )
        self._reproducible = reproducible.asked_for(member.options.hints)
        # Nothing leaves the host of a backend of one host, and devices have no wire formats.
        leaves = moves and member.device.type == "cpu" and not member.backend.capabilities.one_host
        self._wire = wire.asked_for(member.options.hints) if leaves else None
        self.checksums = Checksums(self.group, member.recorder)
        self.checked = parse_bool(member.options.hints.get(CHECKSUM, "false"))
        self._refuses_graphs = not member.backend.capabilities.captured

    @property
    def reads_hints(self) -> bool:
        """Whether the communicator's hints change its operations, which then take the general path."""
        return self._reproducible or self._wire is not None

    # --- the way of an operation ----------------------------------------------------------------------------

    def issue(self, op: IssuedOperation) -> Work:
        """Gives an operation its place in the order and its number, and has it run, with the hooks around it.

        Returns when a synchronous operation has completed. Raises what a pre-hook raises, and the error of a
        synchronous operation.
        """
        hooks, executor = self.hooks, self.executor
        executor.check_can_issue(op)  # before anything that may wait, as for the thread it interrupts
        with _InOrder(self, op.queued):
            self.check_open(op.name)
            if not op.records:
                op.op_id = next_op_id()
            if hooks.active:
                op.args = op.arguments(self.fast)
                hooks.before(op.args)
                self.check_open(op.name)  # a hook may finalize
            op.take_numbers(self.fast)
            if op.args is not None and op.args.seq not in (0, op.calls[0].seq):  # a hook issued others
                op.args = op.arguments(self.fast)
            args = op.args
            work = executor.run(op)
        executor.settle(op, work)
        if args is not None:
            hooks.after(args)
        return work

    def collective(
        self,
        name: str,
        tensors: Sequence[Any],
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
        prepared: object = None,
        residual: torch.Tensor | None = None,
        contributions: Any = None,
        **arguments: Any,
    ) -> Work:
        """Checks and issues a collective; `arguments` are those of the operation table's row.

        `residual`: see `operations.wire.Wire`; without effect if the call has no wire format.
        `contributions`: see `Communicator.all_reduce_contributions`.
        """
        self.check_open(name)
        self.check_capture(name)
        call = self.check.call(name, tensors, **arguments)
        if prepared is not None:
            call.prepared, call.extra = prepared, 1  # all ranks have to
        checked = False
        if hints or self.checked:
            hints, checked = self.take_checksum(name, hints)
        if contributions is not None:
            self._contribute(call, contributions)
        if hints or self._reproducible or self._wire is not None:
            hints = self._options(call, hints)
        if call.wire is not None:
            call.wire.residual = residual
        if checked:
            call.extra |= CHECKED  # all ranks have to
        call.timeout = self.per_op(name, hints, timeout)
        call.async_op = bool(async_op)

        def run() -> None:
            call.start_clock()
            completion.collective(self.group, call)

        return self.issue(IssuedOperation(name, (call,), run, call.timeout, call.async_op, checksum=checked))

    def take_checksum(self, op: str, hints: Hints) -> tuple[Hints, bool]:
        """Takes the hint `checksum` out of a call's. Returns them and whether it is on."""
        checked = self.checked
        if hints and isinstance(hints, Mapping) and CHECKSUM in hints:
            others = copy_hints(hints)
            with self.located(op):
                checked = read_hints({CHECKSUM: others.pop(CHECKSUM)}, (), self.backend.name)[CHECKSUM]
            hints = others
        if not checked:
            return hints, False
        moves_data = self.backend.capabilities.moves_data
        if moves_data and self.member.device.type != "cpu":
            self.refuse(
                op,
                f"no checksums on {self.member.device}",
                "leave out the hint checksum, and UNICOMM_CHECKSUM, for communicators of devices",
            )
        return hints, moves_data

    def _contribute(self, call: Call, contributions: Any) -> None:
        """Makes an all_reduce one of several tensors a rank."""
        assert call.op is not None
        tensor, shape = call.outputs[0], tuple(call.outputs[0].shape)
        if isinstance(contributions, torch.Tensor) or arrays.is_array(contributions):
            contributions = self.check.check_tensor(
                call.operation, "contributions", contributions, False, strided=True
            )
        if not isinstance(contributions, torch.Tensor) or (
            contributions.dtype != tensor.dtype
            or contributions.device != tensor.device
            or contributions.shape[1:] != shape
            or not len(contributions)
        ):
            what = f"a tensor of (rows, {', '.join(map(str, shape))}), {tensor.dtype}, on {tensor.device}"
            self.invalid(call.name, "contributions do not fit the tensor", f"pass {what}")
        if call.op.factor is not None:
            self.refuse(call.name, "contributions cannot be multiplied", "use ReduceOp.SUM or AVG")
        rows = len(contributions)
        call.contributions, call.extra = contributions.detach().reshape(rows, -1).contiguous(), rows
        self._reduction(call, {reproducible.NAME: "reproducible"})

    def _options(self, call: Call, hints: Hints) -> Hints:
        """Applies the hints that choose how operations run. Returns the other hints of the call."""
        given: object = hints
        if given is not None and not isinstance(given, Mapping):
            return hints  # which `per_op` refuses
        others = copy_hints(hints)
        names = (wire.NAME, wire.ROUNDING, *((reproducible.NAME,) if call.op is not None else ()))
        own = {name: others.pop(name) for name in names if name in others}
        with self.located(call.name):
            read_hints(own, (), self.backend.name)
        if call.op is not None and call.contributions is None:
            self._reduction(call, own)
        self._encoding(call, own)
        return others

    def _reduction(self, call: Call, own: Mapping[str, str]) -> None:
        """Makes a reduction reproducible if the hints ask for it."""
        if not (reproducible.asked_for(own) if reproducible.NAME in own else self._reproducible):
            return
        if self.member.device.type != "cpu" and self.backend.capabilities.moves_data:
            self.refuse(
                call.name,
                f"no reproducible reduction on {self.member.device}",
                "reduce on the CPU, by a communicator for it",
            )
        if trouble := reproducible.make(call):
            self.refuse(call.name, *trouble)

    def _encoding(self, call: Call, own: Mapping[str, str]) -> None:
        """Gives a call the wire format that the hints ask for: a call that asks itself must be able to have
        it; the communicator's is for those that can."""
        asked = self._wire
        if wire.NAME in own or (wire.ROUNDING in own and asked is not None):
            asked = wire.asked_for({**self.member.options.hints, **own})
        elif wire.ROUNDING in own:
            self.invalid(call.name, "wire_rounding without a wire format", "pass the hint wire, too")
        if asked is None or call.prepared is not None:
            return
        trouble = wire.why_not(call.name, call.dtype, call.op)
        if trouble is None and self.member.device.type != "cpu":
            trouble = f"no wire formats on {self.member.device}", "use the CPU, or leave the hint out"
        if trouble is None:
            if self.member.size > 1 and self.backend.capabilities.moves_data:
                call.wire = wire.encoding(call.dtype, asked)
        elif wire.NAME in own or (call.op is not None and isinstance(call.op.type, ReproducibleOp)):
            self.refuse(call.name, *trouble)

    def control(self, args: OpArgs, run: Callable[[], T]) -> T:
        """Runs a control operation, such as a split, with the hooks around it. It has no number or record."""
        hooks = self.hooks
        if not hooks.active:
            return run()
        hooks.before(args)
        error: BaseException | None = None
        try:
            result = run()
        except BaseException as caught:
            error = caught
            raise
        finally:
            hooks.finished(args, error)
        hooks.after(args)
        return result

    def raise_recorded(self, name: str, seq: int, job: Callable[[], None]) -> None:
        """Runs `job`, the rest of an operation that a fast path has recorded already; completes its error."""
        try:
            self.check_broken()
            if self.vacant is not None:  # the communicator has other ranks by now
                self.check_open(name)
            job()
        except BaseException as error:
            op = IssuedOperation(name, (), None, self.timeout, async_op=False)
            op.seq = seq
            self.failed(op, error)
            raise

    def fast_failed(self, name: str, result: tuple[int, Any]) -> NoReturn:
        """Raises the error that a fast path returned."""
        seq, fault = result

        def raise_fault() -> None:
            assert isinstance(self.backend, HasFastPath)
            self.backend.raise_fault(fault, self.timeout)

        self.raise_recorded(name, seq, raise_fault)
        raise AssertionError("raise_fault returned")

    def in_order(self) -> contextlib.AbstractContextManager[None]:
        """Holds the order: within the block no operation is issued by another thread or the fast path."""
        return _InOrder(self, False)

    @contextlib.contextmanager
    def quiet(self, seconds: float) -> Iterator[bool]:
        """Keeps other threads from issuing operations.

        Yields whether those that they issue or run themselves ended within `seconds`; those on the fast path
        have as long again.
        """
        free, fast = wait_awake(lambda part: self.order.acquire(timeout=part), seconds), self.fast
        fast.block()

        def fast_path_is_idle(part: float) -> bool:
            end = time.monotonic() + part
            while (running := fast.running()) and time.monotonic() < end:
                time.sleep(_LOOK)
            return not running

        try:
            yield free and wait_awake(fast_path_is_idle, seconds)
        finally:
            fast.unblock()
            if free:
                self.order.release()

    def release(self, handle: object) -> None:
        """Has the backend forget a persistent operation, after the operations that were issued before."""
        with self.in_order():
            backend = self.backend
            if isinstance(backend, PreparesOperations) and not self.finalized:
                self.executor.run_after_pending(lambda: backend.unprepare(handle))

    def _hooks_changed(self, active: bool) -> None:
        if active:
            self.fast.block()
        else:
            self.fast.unblock()

    # --- checks ---------------------------------------------------------------------------------------------

    def refuse(
        self, op: str, message: str, hint: str = "`unicomm doctor` shows what each backend can do"
    ) -> NoReturn:
        raise self.error(UnsupportedError, op, message, hint)

    def invalid(self, op: str, message: str, hint: str) -> NoReturn:
        raise self.error(InvalidArgumentError, op, message, hint)

    def refuse_to_end(self, first: str) -> NoReturn:
        """Refuses `finalize` in the midst of the operation `first`, which the calling thread runs."""
        error = self.error(
            NotReadyError,
            "finalize",
            f"called in the midst of {first}, which this very thread runs",
            "a signal handler calls abort() instead, which ends the operation, and finalize follows it",
        )
        error.amid = True
        raise error

    def error(
        self, kind: type[E], op: str | None, message: str, hint: str, culprits: Sequence[int] = ()
    ) -> E:
        """Makes an error of operation `op` on this communicator."""
        return kind(message, op=op, comm=self.name, rank=self.rank, culprits=culprits, hint=hint)

    def check_open(self, op: str) -> None:
        if self.vacant is not None:
            error = self.vacant.again(self.vacant.message)
            error.op = op
            raise error
        if self.finalized:
            hint = "create a new one with unicomm.new_comm"
            raise self.error(NotReadyError, op, self.closed_because, hint)
        self.check_broken()

    def check_broken(self) -> None:
        if self.broken is not None:
            message = self.broken.message
            if not message.startswith("broken earlier"):
                message = f"broken earlier: {message}"
            raise self.broken.again(message)

    def check_capture(self, op: str) -> None:
        """Refuses an operation that a graph would capture, if the backend's operations cannot be captured.

        Called before anything of the operation is counted, recorded or put on a stream.
        """
        if self._refuses_graphs and self._streams is not None and self._streams.is_capturing():
            self.refuse(
                op,
                f"operations of backend '{self.backend.name}' cannot be captured in a graph",
                "leave them out of the captured part; those of unicomm.symm, nccl and rccl can be captured",
            )

    def refuse_capture(self, op: str) -> None:
        """Refuses a call that connects, closes or allocates while a graph captures the current stream."""
        graphs.refuse_capture(self._streams, op, self.name, self.rank)

    def per_op(self, op: str, hints: Hints, timeout: Timeout) -> float:
        """The timeout of one operation in seconds. Refuses hints for one operation."""
        if hints:
            backend = self.backend.name
            self.refuse(op, f"backend '{backend}' takes no hints for one operation: {hints!r}")
        return self.timeout if timeout is None else self.read_timeout(op, timeout)

    def read_timeout(self, op: str, timeout: Timeout) -> float:
        with self.located(op):
            return seconds(timeout, self.timeout)

    @contextlib.contextmanager
    def located(self, op: str) -> Iterator[None]:
        """Adds operation, communicator and rank to errors that are raised within the block."""
        try:
            yield
        except CommError as error:
            error.locate(op, self.name, self.rank)
            raise

    # --- failure and the end --------------------------------------------------------------------------------

    def failed(self, op: IssuedOperation, error: BaseException) -> None:
        """Completes the error of an operation, records it, and breaks the communicator if it has to."""
        if isinstance(error, CommTimeoutError) and error.comm is None:  # else it has been here
            explain(error, self.member.uid)  # while the records still say what is pending
        code = faults.code_of(error)
        for record in op.records:
            self.member.recorder.finish(record, recording.FAILED, code)
        if isinstance(error, CommError) and not faults.interrupts(error):
            error.locate(op.name, self.name, self.rank, op.seq)
            if not isinstance(error, _HARMLESS):
                self.break_(error)
            return
        # It is unknown how far the operation came, so the ranks are out of step. Going on could match the
        # wrong messages, which some libraries answer by ending the process.
        broken = BackendError(
            f"{type(error).__name__} in the middle of an operation: {error}",
            hint="create a new communicator to go on; unless you interrupted it, please report this",
        )
        broken.locate(op.name, self.name, self.rank, op.seq)
        self.break_(broken, self.backend.abort)

    def break_(self, error: CommError, end: Callable[[], None] = lambda: None) -> None:
        """Marks the communicator as broken; the first error also runs `end` and then the abort hooks."""
        with self._break_lock:
            if self.broken is not None:
                return
            self.ended.clear()
            # Without the traceback, whose frames may hold a graph of torch that holds this communicator.
            # Python does not see what C++ objects hold, so nothing of that would ever be freed.
            self.broken = error.again(error.message)
        try:
            self.fast.block()
            self.executor.broke(error)
            end()
            if self.symmetric is not None:
                self.symmetric.abort(error)
        finally:
            self.ended.set()
        self.member.recorder.set_comm_state(self.member.recorder_index, recording.BROKEN, self.member.uid)
        self.hooks.broken(error)
        options = self.member.options
        if options.enable_reconfigure:  # other ranks go on with this one, as in torchcomms
            return
        if options.abort_process_on_timeout_or_error and not isinstance(error, AbortedError):
            print(f"unicomm: ending the process, as asked for: {error}", file=sys.stderr, flush=True)
            ending.note_exception(error)  # else the verdict would see a crash here
            os.abort()

    def retire(self, reason: CommError) -> None:
        """Ends this engine: the communicator goes on with another one. Late calls here raise `reason`."""
        self.vacant = reason
        self.finalized = self.closing = True
        self.symmetric = None
        self.fast.block()

    def drop_fast_path(self) -> None:
        """Replaces the fast path, which holds the backend's memory, by one that takes no call."""
        self.fast = NoFastPath()
        self.single = None

    def let_go(self, nothing: Backend) -> None:
        """Drops the backend and its store.

        An error that a user keeps holds this engine by its traceback, and the engine holds the error.
        """
        self.backend = self.member.backend = nothing
        self.group = completion.Group(nothing, self.rank, self.group.size)
        self.checksums = Checksums(self.group, self.member.recorder)
        self.member.store = None


class Holder(Protocol):
    """A communicator, as the objects that it hands out see it. `reconfigure` replaces its engine."""

    _engine: Engine


class _InOrder:
    """Holds the order of an engine's operations, and keeps the fast path out.

    Queued messages join the queue that is open; anything else seals it. A class, since a generator would cost
    each operation a microsecond.
    """

    __slots__ = ("_engine", "_outer", "_queued")

    def __init__(self, engine: Engine, queued: bool) -> None:
        self._engine = engine
        self._queued = queued

    def __enter__(self) -> None:
        engine = self._engine
        engine.order.acquire()
        self._outer = engine.issuer  # this thread too, if a hook issues an operation
        engine.issuer = threading.get_ident()
        engine.fast.block()  # also for a message: a later one must not take its number, or run, before it
        if self._queued:
            return
        try:
            engine.executor.seal()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._engine.fast.unblock()
        self._engine.issuer = self._outer
        self._engine.order.release()
