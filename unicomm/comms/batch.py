"""Batches: sends and receives that run together and cannot block one another."""

from __future__ import annotations

from dataclasses import dataclass

from unicomm.comms.execution.engine import Holder
from unicomm.comms.execution.point_to_point import messages
from unicomm.comms.operations.arrays import Array

from .options import Hints, Timeout
from .work import Work


@dataclass(frozen=True)
class P2POp:
    """One entry of a batch: `kind` is "send" or "recv", `peer` a rank of the communicator."""

    kind: str
    tensor: Array
    peer: int


class BatchSendRecv:
    """Collects sends and receives; `issue` runs them together and returns one Work for all.

    A `tensor` must not be touched before the batch has been issued and is done. `async_op`, `hints` and
    `timeout` are those of all operations (`Communicator`).

    Made by `Communicator.batch_op_create`. Messages of a batch do not wait for each other, except that
    several messages between the same two ranks keep their order. After `issue` the batch is empty and may be
    filled again.
    """

    def __init__(self, comm: Holder) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: Array, dst: int) -> BatchSendRecv:
        """Adds a send to rank `dst`; returns the batch. Arguments are checked by `issue`."""
        self.ops.append(P2POp("send", tensor, dst))
        return self

    def recv(self, tensor: Array, src: int) -> BatchSendRecv:
        """Adds a receive from rank `src`; returns the batch. Arguments are checked by `issue`."""
        self.ops.append(P2POp("recv", tensor, src))
        return self

    def issue(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Runs the batch. All its arguments are checked before anything is sent.

        Raises `InvalidArgumentError` for an empty batch. When it raises that, the batch keeps its entries.
        """
        if not self.ops:
            hint = "add sends and receives first; an issued batch is empty again"
            self._comm._engine.invalid("batch", "cannot issue an empty batch", hint)
        engine = self._comm._engine
        if done := engine.fast.batch(self.ops, async_op, hints, timeout):
            if not isinstance(done, Work):
                engine.fast_failed("batch", done)
            self.ops = []
            return done
        items = [(op.kind, op.tensor, op.peer) for op in self.ops]
        work = messages(engine, items, async_op, hints, timeout, batch=True)
        self.ops = []
        return work
