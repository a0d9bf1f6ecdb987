"""Sends and receives: the part of the engine that runs messages, one by one, in batches, or side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unicomm.comms.backend import OpensExchange
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Message, OpArgs
from unicomm.comms.operations.table import OPERATIONS, Kind, Operation

from . import completion
from .hooks import next_op_id
from .message_queue import ANY_RANK, Lane, LaneWork, Posted
from .profiling import events as profiling

if TYPE_CHECKING:
    from unicomm.comms.execution.profiling.session import Span
    from unicomm.comms.options import Hints, Timeout
    from unicomm.comms.work import Work

    from .engine import Engine

NO_SPANS: Sequence[Span] = ()


def messages(
    engine: Engine,
    items: Sequence[tuple[str, Any, Any]],
    async_op: bool,
    hints: Hints,
    timeout: Timeout,
    batch: bool = False,
) -> Work:
    """Sends and receives, together: `items` are (send or recv, tensor, peer)."""
    name = "batch" if batch else items[0][0]
    engine.check_open(name)
    engine.check_capture(name)
    found: list[Message] = []
    for kind, tensor, peer in items:
        row = OPERATIONS.get(kind)
        if row is None or row.kind is not Kind.P2P:
            engine.check.fail(OPERATIONS["batch"], f"kind={kind!r} is unknown", 'it is "send" or "recv"')
        found.append(check_message(engine, row, tensor, peer))
    if batch:
        engine.check.batch(found)
    limit = engine.per_op(name, hints, timeout)
    with engine._in_order():
        engine.check_open(name)
        if not async_op:
            engine.check_can_wait(name)
        op_id = next_op_id()
        args = None
        if engine.hooks.active:
            args = _message_args(engine, name, op_id, found, bool(async_op), limit)
            engine.hooks.before(args)
        queue = engine.queue
        pending = queue is None and (bool(async_op) or engine.worker.busy)
        records, seqs, seq = [], [], 0
        for message in found:
            seq = next_of_pair(engine, message)
            seqs.append(seq)
            flags = (recording.ASYNC if async_op else 0) | (recording.BATCH if batch else 0)
            started = queue is None and not pending
            records.append(_record_message(engine, message, seq, op_id, flags, limit, started))

        def run() -> None:
            completion.exchange(engine.group, found, limit)

        job, spans = run, NO_SPANS
        if profiling.session is not None:
            numbered = list(zip(found, seqs, strict=True))
            job, spans = profiling.messages(engine, numbered, pending, bool(async_op), run)
        tensors = [m.tensor for m in found]
        numbers = [(m.send, m.peer, n) for m, n in zip(found, seqs, strict=True)] if queue else ()
        work: Work = engine._run(
            *(job, name, seq, records, pending, bool(async_op), limit, args, tensors, numbers, spans),
            about=lambda: [profiling.of_message(message) for message in found],
        )
    if pending and not async_op:
        work.wait()
    if args is not None:
        engine.hooks.after(args)
    return work


def post(engine: Engine, kind: str, tensor: Any, peer: Any, timeout: Timeout) -> Work:
    """A send or receive that runs beside its neighbours; the peer of a receive may be `ANY_RANK`."""
    engine.check_open(kind)
    row = OPERATIONS[kind]
    if kind == "recv" and peer == ANY_RANK:
        backend = engine.backend
        if not (isinstance(backend, OpensExchange) and backend.receives_from_any):
            engine.refuse(kind, f"backend '{backend.name}' cannot receive from any rank")
        message = Message(False, ANY_RANK, engine.check.check_tensor(row, "tensor", tensor))
    else:
        if engine.queue is not None:  # it has an order of its own, and nobody waits
            short = engine.fast.send if kind == "send" else engine.fast.recv
            done: Work | bool = short(tensor, peer, True, None, timeout)
            return done or messages(engine, [(kind, tensor, peer)], True, None, timeout)  # type: ignore[return-value]
        message = check_message(engine, row, tensor, peer)
    limit = engine.per_op(kind, None, timeout)
    with engine._order:
        engine.check_open(kind)
        op_id = next_op_id()
        args = None
        if engine.hooks.active:
            args = _message_args(engine, kind, op_id, [message], True, limit)
            engine.hooks.before(args)
        # Which message of a pair it will be is not known before it is there.
        seq = 0 if message.peer == ANY_RANK else next_of_pair(engine, message)
        record = _record_message(engine, message, seq, op_id, recording.ASYNC, limit, False)
        span = None if profiling.session is None else profiling.message(engine, message, seq)
        deadline = time.monotonic() + limit
        while True:
            lane = engine.lane
            if lane is None or not lane.open:
                lane = engine.lane = Lane(engine)
            work = LaneWork(kind, seq, lane, engine.worker)
            if lane.post(Posted(message, work, record, args, deadline, span)):
                break
        if engine.worker.busy:  # with what has to run before
            lane.hand_over()
    if args is not None:
        engine.hooks.after(args)
    return work


def next_of_pair(engine: Engine, message: Message) -> int:
    return int(engine.fast.next_pair_seq(message.peer, message.send))


def _record_message(
    engine: Engine, message: Message, seq: int, op_id: int, flags: int, limit: float, start: bool
) -> int:
    tensors = [message.tensor]
    record: int = engine._recorder.begin(
        engine._recorder_index,
        OPERATIONS["send" if message.send else "recv"].code,
        seq,
        op_id,
        tensors if message.send else [],
        [] if message.send else tensors,
        0,
        message.peer,
        recording.P2P | flags | (0 if message.send else recording.RECEIVE),
        0,
        min(int(limit * 1000), recording.MOST_MS),
        op_id + 1 if flags & recording.BATCH else 0,
        start,
    )
    return record


def check_message(engine: Engine, row: Operation, tensor: Any, peer: Any) -> Message:
    peer = engine.check.check_rank(row, "dst" if row.name == "send" else "src", peer)
    if peer == engine.rank:
        engine.check.fail(row, f"cannot {row.name} to or from oneself", "copy the tensor instead")
    send = row.name == "send"
    return Message(send, peer, engine.check.check_tensor(row, "tensor", tensor, not send))


def _message_args(
    engine: Engine, name: str, op_id: int, messages: list[Message], async_op: bool, timeout: float
) -> OpArgs:
    sent = [m.tensor for m in messages if m.send]
    received = [m.tensor for m in messages if not m.send]
    peer = messages[0].peer if name != "batch" else -1
    return OpArgs(
        name,
        op_id,
        engine.fast.pair_seq(peer, bool(sent)) + 1 if name != "batch" and peer >= 0 else 0,
        sent if name != "batch" else (),
        received if name != "batch" else (),
        peer=peer,
        async_op=async_op,
        timeout=timeout,
        messages=messages,
    )
