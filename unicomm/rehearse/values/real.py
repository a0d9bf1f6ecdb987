"""Real values: what ranks send is kept in files, and each rank computes its results from what all have sent.

Sends never wait, and a collective waits only for the ranks whose data it needs. Whether the operations would
block is for the play to say.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from unicomm.comms.execution.issued import ANY_RANK
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.parts import bytes_of, parts_of
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp

from .turns import Stuck, Turn

Tensor = torch.Tensor
Parts = list[bytes]

#: Operations whose inputs consist of a part for each rank.
_IN_PARTS = {
    *("scatter", "reduce_scatter", "reduce_scatter_v", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "all_to_all_v_single"),
}
_NARROW = (torch.float16, torch.bfloat16)


@dataclass
class Mailbox:
    """The files through which the ranks of a rehearsal exchange data, as one of its ranks sees them."""

    folder: Path
    turn: Turn
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of_group(self, name: str, labels: Sequence[int], rank: int) -> GroupMailbox:
        """Returns the mailbox of a new communicator. Members call it in the same order for one name."""
        key = (name, ",".join(map(str, labels)))
        self.groups[key] += 1
        return GroupMailbox(self, (*key, self.groups[key]), rank, len(labels))

    def file(self, key: object) -> Path:
        return self.folder / hashlib.sha256(repr(key).encode()).hexdigest()[:24]

    def put(self, key: object, value: object) -> None:
        path = self.file(key)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(value))
        os.replace(part, path)


class GroupMailbox:
    """The mailbox of one communicator, as its rank number `rank` of `size` sees it."""

    def __init__(self, box: Mailbox, key: tuple[object, ...], rank: int, size: int) -> None:
        self._box, self._key, self._rank, self._size = box, key, rank, size
        self._counts: Counter[tuple[bool, int, int]] = Counter()

    # --- messages -------------------------------------------------------------------------------------

    def _number(self, send: bool, peer: int, tag: int) -> int:
        self._counts[send, peer, tag] += 1
        return self._counts[send, peer, tag]

    def _message(self, source: int, target: int, tag: int, number: int) -> object:
        return (self._key, "message", source, target, tag, number)

    def send(self, message: Message) -> None:
        number = self._number(True, message.peer, message.tag)
        key = self._message(self._rank, message.peer, message.tag, number)
        self._box.put(key, _bytes(message.tensor))

    def receive(self, message: Message) -> int:
        """Waits for a message, and returns its sender."""
        tag = message.tag
        peers = [message.peer] if message.peer != ANY_RANK else range(self._size)
        files = {
            self._box.file(self._message(peer, self._rank, tag, self._counts[False, peer, tag] + 1)): peer
            for peer in peers
        }
        file = self._box.turn.wait(list(files))
        self._number(False, files[file], tag)
        _write(message.tensor, pickle.loads(file.read_bytes()))
        file.unlink()
        return files[file]

    # --- collectives ----------------------------------------------------------------------------------

    def publish(self, call: Call) -> None:
        """Leaves what this rank contributes to a collective. It is not repeated for the same call."""
        key = (self._key, "collective", call.seq, self._rank)
        if self._box.file(key).exists():
            return
        inputs = call.inputs if call.root in (-1, self._rank) or call.op is not None else []
        if call.name == "broadcast":
            inputs = call.outputs or call.inputs if call.root == self._rank else []
        elif call.name in ("gather", "gather_single"):
            inputs = call.inputs
        if call.name in _IN_PARTS and inputs:
            parts = [_bytes(part) for part in parts_of(inputs, call.in_splits, self._size)]
        else:
            parts = [_bytes(tensor) for tensor in inputs]
        self._box.put(key, (call.signature, parts))

    def _take(self, call: Call, rank: int) -> Parts:
        """Waits for what another rank contributes. A rank that calls something else counts as absent."""
        file = self._box.turn.wait([self._box.file((self._key, "collective", call.seq, rank))])
        signature, parts = pickle.loads(file.read_bytes())
        if signature != call.signature:
            raise Stuck
        return parts  # type: ignore[no-any-return]

    def fill(self, call: Call) -> None:
        """Writes the outputs of a collective, when all that it needs is there."""
        self.publish(call)
        everyone = range(self._size)
        if call.root not in (-1, self._rank):
            if call.name in ("broadcast", "scatter"):
                parts = self._take(call, call.root)
                _write(call.outputs[0], parts[self._rank if call.name == "scatter" else 0])
            return
        if call.name == "broadcast":
            return
        given = [self._take(call, rank) for rank in everyone if call.name != "scatter" or rank == self._rank]
        if not call.outputs:
            return
        if call.op is not None:
            at = self._rank if call.name in _IN_PARTS else 0
            _fold(call.op, [parts[at] for parts in given], call.outputs[0])
        elif call.name == "scatter":
            _write(call.outputs[0], given[0][self._rank])
        else:
            at = self._rank if call.name in _IN_PARTS else 0
            outputs = parts_of(call.outputs, call.out_splits, self._size)
            for output, parts in zip(outputs, given, strict=True):
                _write(output, parts[at])


def _bytes(tensor: Tensor) -> bytes:
    return bytes_of(tensor.detach()).cpu().numpy().tobytes()


def _write(tensor: Tensor, data: bytes) -> None:
    target = bytes_of(tensor.detach())
    if target.numel() != len(data):
        raise Stuck
    if data:
        target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _fold(op: ReduceOp, given: Sequence[bytes], output: Tensor) -> None:
    """Reduces the ranks' data in their order, narrow types in single precision."""
    out = output.detach()
    if any(len(data) != out.numel() * out.element_size() for data in given):
        raise Stuck
    if not out.numel():
        return
    wide = torch.float32 if out.dtype in _NARROW else out.dtype
    values = [torch.frombuffer(bytearray(data), dtype=out.dtype).to(wide) for data in given]
    total = values[0]
    for value in values[1:]:
        total = _two(op.type, total, value)
    if op.type in (RedOpType.AVG, ReproducibleOp.REPRODUCIBLE_AVG):
        total = total / len(values) if wide.is_floating_point or wide.is_complex else total // len(values)
    elif op.type == RedOpType.PREMUL_SUM:
        assert op.factor is not None
        total = total * op.factor
    out.copy_(total.reshape(out.shape))


def _two(kind: RedOpType | ReproducibleOp, a: Tensor, b: Tensor) -> Tensor:
    if kind == RedOpType.PRODUCT:
        return a * b if a.dtype != torch.bool else a & b
    if kind == RedOpType.MIN:
        return torch.minimum(a, b)
    if kind == RedOpType.MAX:
        return torch.maximum(a, b)
    if kind == RedOpType.BAND:
        return a & b
    if kind == RedOpType.BOR:
        return a | b
    if kind == RedOpType.BXOR:
        return a ^ b
    return a + b if a.dtype != torch.bool else a | b
