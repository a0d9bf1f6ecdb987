"""Sends and receives: one by one, in batches that run together, or queued to run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicomm.comms.backend import OpensExchange
from unicomm.comms.failures import faults
from unicomm.comms.operations import recording
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.table import OPERATIONS, Kind, Operation
from unicomm.comms.options import Hints, Timeout
from unicomm.comms.work import Work

from .composed import completion
from .engine import Engine
from .issued import ANY_RANK, IssuedOperation


def messages(
    engine: Engine,
    items: Sequence[tuple[str, Any, Any]],
    async_op: bool,
    hints: Hints,
    timeout: Timeout,
    batch: bool = False,
) -> Work:
    """Issues sends and receives that run together. `items`: ("send" or "recv", tensor, peer)."""
    name = "batch" if batch else items[0][0]
    engine.check_open(name)
    engine.check_capture(name)
    found: list[Message] = []
    rows: list[Operation] = []
    for kind, tensor, peer in items:
        row = OPERATIONS.get(kind)
        if row is None or row.kind is not Kind.P2P:
            engine.invalid("batch", f"kind={kind!r} is unknown", 'it is "send" or "recv"')
        found.append(_check_message(engine, row, tensor, peer))
        rows.append(row)
    if batch:
        engine.check.batch(found)
    hints, checked = engine.take_checksum(name, hints)
    limit = engine.per_op(name, hints, timeout)

    def run() -> None:
        completion.exchange(engine.group, found, limit)

    calls = [_call(row, message, limit, async_op) for row, message in zip(rows, found, strict=True)]
    return engine.issue(IssuedOperation(name, calls, run, limit, bool(async_op), checksum=checked))


def post(engine: Engine, kind: str, tensor: Any, peer: Any, timeout: Timeout, tag: int = 0) -> Work:
    """Issues a "send" or "recv" that runs beside its neighbours; a receive may have `ANY_RANK` as its peer.

    The operation is asynchronous. On a device it goes to the communicator's stream, and the tag has no
    meaning.
    """
    engine.check_open(kind)
    engine.check_capture(kind)
    row = OPERATIONS[kind]
    most = engine.backend.capabilities.most_tag
    if not 0 <= tag <= most:
        engine.invalid(kind, f"tag={tag!r} is not in range [0, {most}]", "use a smaller tag")
    if kind == "recv" and peer == ANY_RANK:
        backend = engine.backend
        if not (isinstance(backend, OpensExchange) and backend.receives_from_any):
            engine.refuse(kind, f"backend '{backend.name}' cannot receive from any rank")
        message = Message(False, ANY_RANK, engine.check.check_tensor(row, "tensor", tensor))
    else:
        short = engine.fast.send if kind == "send" else engine.fast.recv
        done: Work | bool = False if tag else short(tensor, peer, True, None, timeout)
        if isinstance(done, Work):
            return done
        message = _check_message(engine, row, tensor, peer)
    message = message._replace(tag=tag)
    _, checked = engine.take_checksum(kind, None)
    limit = engine.per_op(kind, None, timeout)

    call = _call(row, message, limit, True)

    def run() -> None:
        completion.exchange(engine.group, [message], limit)

    return engine.issue(
        IssuedOperation(kind, (call,), run, limit, async_op=True, queued=True, checksum=checked)
    )


def post_begun(
    engine: Engine, kind: str, tensor: Any, peer: int, tag: int, begun: tuple[int, int, int]
) -> Work:
    """Queues a message that `_core.SingleMessages` has numbered and recorded: `begun` is what it returned."""
    seq, op_id, record = begun
    row = OPERATIONS[kind]
    message = Message(kind == "send", peer, tensor, tag)
    call = _call(row, message, engine.timeout, True)
    call.seq = seq
    op = IssuedOperation(
        kind, (call,), None, engine.timeout, async_op=True, queued=True, seq=seq,
        messages=((message.send, peer, seq),), records=(record,),
    )  # fmt: skip
    op.op_id = op_id
    try:
        return engine.issue(op)
    except BaseException as error:
        engine.member.recorder.finish(record, recording.FAILED, faults.code_of(error))
        raise
    finally:
        engine.fast.unblock()


def _call(row: Operation, message: Message, timeout: float, async_op: bool) -> Call:
    tensors = [message.tensor]
    inputs, outputs = (tensors, []) if message.send else ([], tensors)
    call = Call(row, inputs, outputs, peer=message.peer, timeout=timeout, async_op=bool(async_op))
    call.tag = message.tag
    return call


def _check_message(engine: Engine, row: Operation, tensor: Any, peer: Any) -> Message:
    peer = engine.check.check_rank(row, "dst" if row.name == "send" else "src", peer)
    if peer == engine.rank:
        engine.invalid(row.name, f"cannot {row.name} to or from oneself", "copy the tensor instead")
    send = row.name == "send"
    return Message(send, peer, engine.check.check_tensor(row, "tensor", tensor, not send))
