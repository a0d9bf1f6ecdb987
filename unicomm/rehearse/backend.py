"""The backend of a rehearsal: one process plays one rank, moves nothing, and records what it issues.

An asynchronous operation counts as completed when the program waits for it, so that a ring tells where
the program waits. Its values are there at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch

from unicomm.c10d.compat import at_end_of_backward
from unicomm.comms.backend import (
    Backend,
    Capabilities,
    Exchange,
    ExtendsDeadlines,
    OpensExchange,
    RunsCollectives,
    Setup,
)
from unicomm.comms.execution.composed.exchanges import JointExchange
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.executor import Executor, MakesExecutor
from unicomm.comms.execution.issued import ANY_RANK, IssuedOperation
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import OPERATIONS, Kind
from unicomm.comms.work import Work

from .details import Details
from .values import made_up, reads
from .values.notes import OBJECTS, Notes
from .values.real import Mailbox
from .values.recorded import ReceivedValues
from .values.turns import Stuck

_DEPTH = 24  # frames between an operation and the function of objects that it belongs to


class RehearsalBackend(Backend, RunsCollectives, OpensExchange, ExtendsDeadlines, MakesExecutor):
    name = "rehearse"
    protocol_version = 1
    receives_from_any = True
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda", "xpu", "mps", "meta"}),
        operations=frozenset(n for n, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE),
        reduce_dtypes=frozenset(DTYPES),
        reduce_ops=frozenset(RedOpType),
        moves_data=False,
    )
    notes: ClassVar[Notes]
    details: ClassVar[Details]
    mail: ClassVar[Mailbox | None] = None  # with real values
    received: ClassVar[ReceivedValues | None] = None  # with values to keep, or recorded ones
    leave: ClassVar[Callable[[], NoReturn]]  # ends the rank where it is

    def __init__(self, setup: Setup) -> None:
        self.rank, self.size, self.labels = setup.rank, setup.size, setup.labels
        self.capabilities = replace(type(self).capabilities, moves_data=setup.device.type != "meta")
        self._notes = self.notes.of_group(setup.name, list(setup.labels))
        self.mailbox = None if self.mail is None else self.mail.of_group(setup.name, setup.labels, setup.rank)
        self.details.add_group(setup.name, setup.labels)
        self._from = setup.rank

    @classmethod
    def connect(cls, setup: Setup) -> RehearsalBackend:
        return cls(setup)

    def executor(self, engine: Engine) -> Executor:
        return RehearsalExecutor(engine)

    def run(self, call: Call) -> None:
        with torch.no_grad():
            if self.mailbox is not None:
                self.mailbox.fill(call)
                return
            made_up.fill(call, self.rank, self.size, self._notes)
        if call.name != "barrier":
            reads.mark(call.outputs if call.root != self.rank or call.op is not None else ())

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        """Made-up messages from any rank come from one rank after the other."""
        if self.mailbox is not None:
            for message in messages:
                if message.send:
                    self.mailbox.send(message)
                    continue
                self._from = self.mailbox.receive(message)
                if message.peer == ANY_RANK:
                    reads.mark([message.tensor], reads.FROM_ANY)
            return
        known = []
        for message in messages:
            if message.peer == ANY_RANK:
                self._from = (self._from + 1) % self.size
                if self._from == self.rank:
                    self._from = (self._from + 1) % self.size
                message = message._replace(peer=self._from)  # noqa: PLW2901
            known.append(message)
        with torch.no_grad():
            made_up.exchange(known, self.rank, self._notes)
        reads.mark([message.tensor for message in known if not message.send])

    @property
    def last_sender(self) -> int:
        return self._from

    def open_exchange(self) -> Exchange:
        return JointExchange(self)

    def expect_slow(self, name: str, seconds: float) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class RehearsedWork(Work):
    """The handle of an asynchronous operation, which is over when the program waits for it.

    `fill`: receives its data, and returns the other rank of a message. `over`: notes that the program waits.
    """

    def __init__(self, op: IssuedOperation, fill: Callable[[], int], over: Callable[[], None]) -> None:
        super().__init__(op.name, op.seq, False)
        self._fill: Callable[[], int] | None = fill
        self._over: Callable[[], None] | None = over
        self._telling = False

    def _filled(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            self.peer = fill()

    def _waited(self) -> None:
        self._filled()
        if self._over is not None and not self._telling:
            over, self._over = self._over, None
            over()

    def wait(self, timeout: timedelta | float | None = None) -> None:
        self._waited()
        super().wait(timeout)

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls back at once. The program has not waited yet, even if the callback asks for the state."""
        self._filled()
        self._telling = True
        try:
            super().add_done_callback(callback)
        finally:
            self._telling = False
        at_end_of_backward(self._waited)  # C++ waits there for the future that torch has asked for

    def is_completed(self) -> bool:
        """Returns True, so that a program that asks again and again goes on; it counts as waiting."""
        self._waited()
        return True


class RehearsalExecutor(Executor):
    """Runs each operation in the caller's thread, at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, op: IssuedOperation) -> Work:
        engine, recorder = self._engine, self._engine.member.recorder
        calls = op.calls
        op.calls = [_as_shown(call) for call in calls]
        op.begin(engine.member, True)
        op.calls = calls
        details, begin = RehearsalBackend.details, time.process_time_ns()
        places = details.add(calls)
        records = list(op.records)

        def over() -> None:
            for record in records:
                recorder.finish(record, recording.COMPLETED, 0)

        def waited() -> None:
            over()
            details.add_events((-1 - place for place in places), time.process_time_ns())

        fill = self._start(op, calls, places)
        if op.async_op and self._backend.mailbox is not None:
            details.add_events(places, begin)
            return RehearsedWork(op, fill, waited)
        peer = fill()
        details.add_events(places, begin)
        if not op.async_op:
            over()
            return Work(op.name, op.seq, False)
        work = RehearsedWork(op, lambda: peer, waited)
        work.peer = peer
        return work

    @property
    def _backend(self) -> RehearsalBackend:
        return self._engine.backend  # type: ignore[return-value]

    def _start(self, op: IssuedOperation, calls: Sequence[Call], at: range) -> Callable[[], int]:
        """Sends what an operation sends. Returns a function that receives the rest and returns the peer."""
        backend, run = self._backend, op.run
        if backend.mailbox is not None:
            if calls[0].operation.is_message:
                found = [call.message for call in calls]
                backend.exchange([message for message in found if message.send], op.timeout)
                run = partial(backend.exchange, [m for m in found if not m.send], op.timeout)
            elif calls[0].operation.is_collective:
                backend.mailbox.publish(calls[0])
        elif op.queued:
            run = partial(backend.exchange, [calls[0].message], op.timeout)
        assert run is not None
        peer = calls[0].peer if op.name != "batch" else -1
        kept = backend.received
        places = kept.issued(calls, backend.rank) if kept is not None and not _of_objects() else ()

        def fill() -> int:
            try:
                run()
                if kept is not None:
                    kept.received(places)
            except Stuck:
                RehearsalBackend.leave()
            except BaseException as error:
                self._engine.failed(op, error)
                raise
            if peer == ANY_RANK and backend.mailbox is not None:
                RehearsalBackend.details.senders[at[0]] = backend.labels[backend.last_sender]
            if op.args is not None:
                self._engine.hooks.finished(op.args, None)
            return backend.last_sender if peer == ANY_RANK and op.queued else peer

        return fill

    def settle(self, op: IssuedOperation, work: Work) -> None:
        pass

    def run_after_pending(self, job: Callable[[], None]) -> None:
        job()

    @property
    def busy(self) -> bool:
        return False

    def pending(self) -> Sequence[Work]:
        return ()

    def drain(self, timeout: float) -> bool:
        return True

    def forget(self) -> None:
        pass


def _as_shown(call: Call) -> Call:
    """Returns the call as it is recorded.

    A pickled object may have another length on each rank, which is no mismatch: it is recorded as one byte.
    """
    if call.dtype is not torch.uint8 and not (call.operation.is_message and _is_bytes(call)):
        return call
    if not _of_objects():
        return call
    one = torch.zeros(1, dtype=torch.uint8)
    return call.changed(inputs=[one] * bool(call.inputs), outputs=[one] * bool(call.outputs))


def _of_objects() -> bool:
    """Returns whether the operation that is issued belongs to a function of objects."""
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name in OBJECTS:
            return True
        frame = frame.f_back
    return False


def _is_bytes(call: Call) -> bool:
    return (call.inputs or call.outputs)[0].dtype is torch.uint8
