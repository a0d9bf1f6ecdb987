"""What a rank would receive, made up from its own data as if all ranks held equal data.

Each operation keeps its exact meaning: a sum over n ranks is n times the own value, a gather has n copies, a
part that rank j would send to this rank is this rank's own part for itself. `Notes` holds small values that
other ranks have really sent, which count instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.parts import bytes_of, parts_of
from unicomm.comms.operations.reduction import RedOpType, ReproducibleOp

if TYPE_CHECKING:
    from .notes import GroupNotes

Tensor = torch.Tensor


def fill(call: Call, rank: int, size: int, notes: GroupNotes) -> None:
    """Writes the outputs of a collective that this rank, number `rank` of `size`, takes part in."""
    if not call.outputs or call.name == "barrier":
        if call.root == rank and call.inputs:
            _note_root(call, size, notes)
        return
    if call.outputs[0].device.type == "meta":
        return
    if call.op is not None:
        if call.root in (-1, rank):
            _reduce(call, rank, size)
    elif call.name == "broadcast":
        if call.root == rank:
            notes.put(("broadcast", call.seq, call.root), call.outputs[0])
        else:
            notes.get(("broadcast", call.seq, call.root), call.root, call.outputs[0])
    elif call.name == "scatter":
        _scatter(call, rank, size, notes)
    elif call.inputs:
        outs = parts_of(call.outputs, call.out_splits, size)
        if call.name.startswith("all_to_all"):
            mine = parts_of(call.inputs, call.in_splits, size)[rank]
        else:
            mine = bytes_of(call.inputs[0])
        for out in outs:
            _copy(out, mine)


def _copy(out: Tensor, source: Tensor) -> None:
    """Copies bytes. A longer output gets them again and again; one without a source becomes zero."""
    n = source.numel()
    if out.data_ptr() == source.data_ptr() or not out.numel():
        return
    if n == out.numel():
        out.copy_(source)
    elif n > out.numel():
        out.copy_(source[: out.numel()])
    elif n:
        out.copy_(source.repeat(-(-out.numel() // n))[: out.numel()])
    else:
        out.zero_()


def _reduce(call: Call, rank: int, size: int) -> None:
    assert call.op is not None
    out = call.outputs[0].detach()
    source = call.inputs[0].detach()
    if call.name.startswith("reduce_scatter"):
        if len(call.inputs) == 1 and size > 1:
            source = source.reshape(-1)[rank * out.numel() : (rank + 1) * out.numel()]
        else:
            source = call.inputs[rank].detach()
    kind, value = call.op.type, source.reshape(out.shape)
    if kind in (RedOpType.SUM, ReproducibleOp.REPRODUCIBLE_SUM):
        value = value if value.dtype == torch.bool else value * size
    elif kind == RedOpType.PREMUL_SUM:
        assert call.op.factor is not None
        value = value * (call.op.factor * size)
    elif kind == RedOpType.PRODUCT:
        value = value if value.dtype == torch.bool else value**size
    elif kind == RedOpType.BXOR and size % 2 == 0:
        value = torch.zeros_like(value)
    if value is not source or out.data_ptr() != source.data_ptr():
        out.copy_(value)


def _note_root(call: Call, size: int, notes: GroupNotes) -> None:
    if call.name == "scatter":
        for to, part in enumerate(call.inputs[:size]):
            notes.put(("scatter", call.seq, call.root, to), part)


def _scatter(call: Call, rank: int, size: int, notes: GroupNotes) -> None:
    out = call.outputs[0]
    if call.root == rank:
        _note_root(call, size, notes)
        _copy(bytes_of(out), bytes_of(call.inputs[rank]))
    elif not notes.get(("scatter", call.seq, call.root, rank), call.root, out):
        smooth(out)


def exchange(messages: Sequence[Message], rank: int, notes: GroupNotes) -> None:
    """Notes what is sent and writes what is received: a noted value, else the like of what was sent last."""
    for message in messages:
        tensor, tag = message.tensor, message.tag
        if tensor.device.type == "meta":
            continue
        if message.send:
            key = ("message", rank, message.peer, tag, notes.count("send", message.peer, tag))
            notes.put(key, tensor)
            continue
        key = ("message", message.peer, rank, tag, notes.count("recv", message.peer, tag))
        if not notes.get(key, message.peer, tensor):
            smooth(tensor)


def smooth(tensor: Tensor) -> None:
    """Fills a tensor of which nothing is known: numbers from -1 to 1 that differ, or zeros of integers."""
    with torch.no_grad():
        if tensor.is_floating_point():
            flat = torch.linspace(-1, 1, max(tensor.numel(), 1), dtype=torch.float32)[: tensor.numel()]
            tensor.copy_(flat.reshape(tensor.shape))
        else:
            tensor.zero_()
