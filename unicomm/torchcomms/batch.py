"""Batches as torchcomms has them: `issue` keeps the operations, so that it sends them again."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unicomm.comms.batch import BatchSendRecv as OurBatch
from unicomm.comms.operations.arrays import Array
from unicomm.comms.work import Work

from .options import BatchP2POptions, check_hints

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Holder


class P2POpType(enum.Enum):
    SEND = 0
    RECV = 1


@dataclass
class P2POp:
    """One send or receive of a batch; `peer` is a rank of the communicator."""

    type: P2POpType
    tensor: Array
    peer: int


class BatchSendRecv:
    """Sends and receives that run together. Made by `TorchComm.batch_op_create`."""

    def __init__(self, comm: Holder) -> None:
        self._comm = comm
        self.ops: list[P2POp] = []

    def send(self, tensor: Array, dst: int) -> None:
        """Adds a send to rank `dst`."""
        self.ops.append(P2POp(P2POpType.SEND, tensor, dst))

    def recv(self, tensor: Array, src: int) -> None:
        """Adds a receive from rank `src`."""
        self.ops.append(P2POp(P2POpType.RECV, tensor, src))

    def issue(self, async_op: bool, options: BatchP2POptions | None = None) -> Work:
        """Runs the operations in `ops`, which stay there. Raises `InvalidArgumentError` if there are none."""
        options = options or BatchP2POptions()
        check_hints(options.hints)
        batch = OurBatch(self._comm)
        for op in self.ops:
            (batch.send if op.type is P2POpType.SEND else batch.recv)(op.tensor, op.peer)
        return batch.issue(async_op, timeout=options.timeout)
