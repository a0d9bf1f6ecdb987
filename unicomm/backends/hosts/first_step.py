"""The first step of every collective over several hosts: all ranks compare what they call.

The ranks of a host compare signatures in shared memory. The leaders exchange slots with their hosts'
signatures, and tell their hosts the outcome. Over UCX, the native core compares signatures, whoever moves the
data (csrc/hosts/fast.hpp).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from unicomm import _core
from unicomm.comms.errors import CommError, MismatchError
from unicomm.comms.execution.composed.exchanges import Trade, Traffic
from unicomm.comms.failures.faults import Claim, minority, mismatch
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import ReduceOp
from unicomm.comms.operations.table import OPERATIONS

from .layout import Layout

Tensor = torch.Tensor

#: Bytes of a host's data that travel with the signatures over Gloo. Larger data take a second round trip.
INLINE = 4096
#: Bytes in front of them: a cache line, which also aligns the data for any element type.
_HEAD = 64
#: Bytes of a slot over Gloo, whose slots all have one size.
SLOT = _HEAD + INLINE
_SIGNATURE = struct.Struct("<QQ")  # signature, and whether the ranks of the host have the same one
_CLAIM = struct.Struct("<qqqqqQ")  # `Call.signature`
_BYTE = torch.uint8


class Links(Protocol):
    """What the collectives run on. Its errors are the communicator's own."""

    layout: Layout
    inline: int  #: bytes of a host's data that travel with the signatures, if all ranks need them all

    def agree(self, call: Call) -> bool:
        """Runs the first step of a collective in the native core, if it can. Returns whether it did."""

    def local(self, call: Call, seconds: float, late: bool = False) -> None:
        """Runs a collective of this host's ranks; `late`: some of them may wait for other hosts."""

    def messages(self, messages: Sequence[Message], seconds: float) -> None:
        """Runs messages with any ranks."""

    def overlapping(self, call: Call, trade: Trade) -> AbstractContextManager[Traffic]:
        """Opens traffic with ranks of other hosts that goes on while this rank computes."""

    def all_gather(self, slot: Tensor, seconds: float) -> list[Tensor]:
        """Returns every leader's `slot`, in order of their hosts, or more bytes. Leaders only."""

    def straight(self, call: Call) -> None:
        """Runs a collective of all ranks, composed from messages."""


def sub(
    name: str, inputs: list[Tensor], outputs: list[Tensor], *, root: int = -1, op: ReduceOp | None = None
) -> Call:
    tensors = inputs or outputs
    dtype = tensors[0].dtype if tensors else None
    return Call(OPERATIONS[name], inputs, outputs, dtype, root=root, op=op)


def first_step(
    links: Links,
    call: Call,
    local: Call | None = None,
    mine: Tensor | None = None,
    combine: Callable[[list[Tensor]], Tensor] | None = None,
    result: int = 0,
) -> Tensor:
    """Compares signatures. Raises `MismatchError` on all ranks, or returns the result.

    Args:
        local: a collective that the ranks of the host run first, and which makes the leader's `mine`.
        mine: up to `Links.inline` bytes that the leader sends along.
        combine: makes the result, of `result` bytes, of every host's bytes.
    """
    if links.agree(call) and local is None and mine is None:
        return torch.empty(0, dtype=_BYTE, device="cpu")
    layout = links.layout
    signature = _core.hosts_signature(*call.signature)
    local = local or sub("barrier", [], [])
    local.extra = signature
    alike = True
    try:
        links.local(local, call.remaining())
    except MismatchError:
        alike = False
    answer = torch.empty(_HEAD + result, dtype=_BYTE, device="cpu")
    good = False
    if layout.is_leader:
        length = mine.numel() if mine is not None and alike else 0
        slot = torch.zeros(_HEAD + length, dtype=_BYTE, device="cpu")
        _SIGNATURE.pack_into(slot.numpy().data, 0, signature, alike)
        if mine is not None and length:
            slot[_HEAD:] = mine
        slots = links.all_gather(slot, call.remaining())
        good = all(_SIGNATURE.unpack_from(s.numpy().data) == (signature, True) for s in slots)
        if good and combine is not None:
            answer[_HEAD:] = combine([s[_HEAD:] for s in slots])
        answer[0] = good
    if alike and len(layout.members) > 1:
        links.local(sub("broadcast", [], [answer], root=0), call.remaining(), late=True)
        good = bool(answer[0])
    if not good:
        raise explain(links, call.signature, call.remaining())
    return answer[_HEAD:]


def explain(links: Links, signature: tuple[int, ...], seconds: float) -> CommError:
    """Collective after a mismatch, of which it returns the error: all ranks exchange what they called."""
    layout = links.layout
    mine = torch.empty(_CLAIM.size, dtype=_BYTE, device="cpu")
    _CLAIM.pack_into(mine.numpy().data, 0, *signature)
    room = layout.largest * _CLAIM.size
    table = torch.zeros(len(layout.hosts) * room, dtype=_BYTE, device="cpu")
    block = table[layout.host * room :][: len(layout.members) * _CLAIM.size]
    links.local(sub("all_gather", [mine], list(torch.split(block, _CLAIM.size))), seconds)
    if layout.is_leader:
        for h, block in enumerate(links.all_gather(table[layout.host * room :][:room], seconds)):
            table[h * room :][:room] = block[:room]
    links.local(sub("broadcast", [], [table], root=0), seconds, late=True)
    claims = []
    for rank in range(layout.size):
        at = layout.host_of[rank] * room + layout.local_of[rank] * _CLAIM.size
        claims.append(Claim(rank, *_CLAIM.unpack_from(table.numpy().data, at)))
    culprits = minority([claim[1:] for claim in claims])
    return mismatch(claims, culprits)
