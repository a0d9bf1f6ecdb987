"""The first step of every collective over several hosts: all ranks learn that they call the same thing.

The ranks of a host compare signatures in shared memory; the leaders swap slots of one size with their
hosts' signatures, and tell their hosts what came of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unicomm.backends.out_of_band.signatures import minority
from unicomm.backends.shm import _mismatch, _mismatch_hint
from unicomm.comms.errors import MismatchError
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OPERATIONS

from .layout import Layout

Tensor = torch.Tensor

#: Bytes of a host's data that travel with the signatures; what is larger takes a second round trip.
INLINE = 4096
#: Bytes in front of them: what a cache line has, which also aligns the data for any element type.
_HEAD = 64
_SIGNATURE = struct.Struct("<QQ")  # signature, and whether the ranks of the host agree
_CLAIM = struct.Struct("<qqqqqQ")  # op, dtype, reduction, root, count, extra
_BYTE = torch.uint8


class Links(Protocol):
    """What the collectives run on. Errors come out as the communicator's own."""

    layout: Layout

    def local(self, call: Call, seconds: float, late: bool = False) -> None:
        """A collective of this host's ranks; `late`: some of them may have to wait for other hosts."""

    def messages(self, messages: Sequence[Message], seconds: float) -> None:
        """Messages with any ranks."""

    def swap(self, slot: Tensor, seconds: float) -> list[Tensor]:
        """Every leader's `slot`, in order of their hosts; all have one size. Leaders only."""

    def straight(self, call: Call) -> None:
        """A collective of all ranks, composed from messages."""


def sub(
    name: str, inputs: list[Tensor], outputs: list[Tensor], *, root: int = -1, op: ReduceOp | None = None
) -> Call:
    tensors = inputs or outputs
    dtype = tensors[0].dtype if tensors else None
    return Call(OPERATIONS[name], inputs, outputs, dtype, root=root, op=op)


def agree(
    links: Links,
    call: Call,
    local: Call | None = None,
    mine: Tensor | None = None,
    combine: Callable[[list[Tensor]], Tensor] | None = None,
    result: int = 0,
) -> Tensor:
    """The first step of every collective. Raises `MismatchError` on all ranks, or returns the result.

    `local` is what the ranks of the host do first, and makes the leader's `mine`, up to `INLINE` bytes; the
    leader makes `result` bytes from every host's with `combine`.
    """
    layout = links.layout
    signature = _signature(call)
    local = local or sub("barrier", [], [])
    local.extra = signature
    agreed = True
    try:
        links.local(local, call.remaining())
    except MismatchError:
        agreed = False
    answer = torch.empty(_HEAD + result, dtype=_BYTE)
    good = False
    if layout.is_leader:
        slot = torch.zeros(_HEAD + INLINE, dtype=_BYTE)
        _SIGNATURE.pack_into(slot.numpy().data, 0, signature, agreed)
        length = 0
        if mine is not None and agreed:
            length = mine.numel()
            slot[_HEAD : _HEAD + length] = mine
        slots = links.swap(slot, call.remaining())
        good = all(_SIGNATURE.unpack_from(s.numpy().data) == (signature, True) for s in slots)
        if good and combine is not None:
            answer[_HEAD:] = combine([s[_HEAD:] for s in slots])
        answer[0] = good
    if agreed and len(layout.members) > 1:
        links.local(sub("broadcast", [], [answer], root=0), call.remaining(), late=True)
        good = bool(answer[0])
    if not good:
        raise _explain(links, call)
    return answer[_HEAD:]


def _signature(call: Call) -> int:
    parts = (call.operation.code, call.dtype_code, call.red_code, call.root, call.count, call.extra)
    return hash(parts) & ((1 << 64) - 1)


def _explain(links: Links, call: Call) -> MismatchError:
    """After a mismatch: all ranks tell what they called."""
    layout = links.layout
    mine = torch.empty(_CLAIM.size, dtype=_BYTE)
    fields = (call.operation.code, call.dtype_code, call.red_code, call.root, call.count, call.extra)
    _CLAIM.pack_into(mine.numpy().data, 0, *fields)
    room = layout.largest * _CLAIM.size
    told = torch.zeros(len(layout.hosts) * room, dtype=_BYTE)
    block = told[layout.host * room :][: len(layout.members) * _CLAIM.size]
    seconds = call.remaining()
    links.local(sub("all_gather", [mine], list(torch.split(block, _CLAIM.size))), seconds)
    if layout.is_leader:
        for h, block in enumerate(links.swap(told[layout.host * room :][:room], seconds)):
            told[h * room :][:room] = block
    links.local(sub("broadcast", [], [told], root=0), seconds, late=True)
    claims = []
    for rank in range(layout.size):
        at = layout.host_of[rank] * room + layout.local_of[rank] * _CLAIM.size
        claims.append((rank, *_CLAIM.unpack_from(told.numpy().data, at)))
    culprits = minority([claim[1:] for claim in claims])
    return MismatchError(_mismatch(claims, ""), culprits=culprits, hint=_mismatch_hint(culprits))
