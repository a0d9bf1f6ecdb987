"""Collectives of ranks on several hosts: memory within a host, messages between the hosts' leaders.

Every collective begins with the same step, so that ranks which call different things notice before a byte
of a user's tensor is written: the ranks of a host compare signatures in shared memory, the leaders exchange a
slot of fixed size with theirs, and tell their host what came of it. A small operation's data travel in the
slots and in the answer, and then that is all.

    all_reduce, reduce      reduce to the leader, all-reduce or reduce between leaders, broadcast in the host
    broadcast               from the root in its host, between leaders, then in the other hosts
    all_gather ...          gather in the host, whole hosts' parts between leaders, broadcast in the host
    reduce_scatter ...      reduce to the leader, reduce-scatter between leaders, scatter in the host
    gather, scatter, all_to_all ...     straight to whom it is for

Sums, averages and products of 16-bit and 8-bit floats are carried in float32 until all ranks' values are in,
and rounded once, as on one host.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unicomm import _core
from unicomm.comms.call import Call, Message
from unicomm.comms.completion import bytes_of, parts_of
from unicomm.comms.errors import MismatchError
from unicomm.comms.ops import OPERATIONS
from unicomm.comms.reduction import RedOpType, ReduceOp

from .hosts_layout import Layout
from .shm import _mismatch, _mismatch_hint

Tensor = torch.Tensor

#: Bytes of a host's data that travel with the signatures; what is larger takes a second round trip.
INLINE = 4096
#: Bytes in front of them: what a cache line has, which also aligns the data for any element type.
_HEAD = 64
_SIGNATURE = struct.Struct("<QQ")  # signature, and whether the ranks of the host agree
_CLAIM = struct.Struct("<qqqqqQ")  # op, dtype, reduction, root, count, extra
#: Elements of a large reduction under way at a time: bounds the memory that it needs.
_PIECE = 8 << 20
_BYTE = torch.uint8
_NARROW = frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
_ROUNDS = frozenset({RedOpType.SUM, RedOpType.PRODUCT, RedOpType.AVG, RedOpType.PREMUL_SUM})
_SUMS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


class Links(Protocol):
    """What the collectives run on. Errors come out as the communicator's own."""

    layout: Layout

    def local(self, call: Call, seconds: float, for_leader: bool = False) -> None:
        """A collective of this host's ranks; `for_leader`: that waits for what the leader waits for."""

    def local_messages(self, messages: Sequence[Message], seconds: float, for_leader: bool = False) -> None:
        """Messages within the host, by local rank."""

    def between(self, call: Call, seconds: float) -> None:
        """A collective of the leaders, whose ranks are the hosts' numbers. Leaders only."""

    def swap(self, slot: Tensor, seconds: float) -> list[Tensor]:
        """Every leader's `slot`. Leaders only."""

    def straight(self, call: Call) -> None:
        """A collective of all ranks, composed from messages."""


def run(links: Links, call: Call) -> None:
    """Runs a collective of all ranks."""
    _RUN[call.name](links, call)


# --- agreeing ----------------------------------------------------------------------------------------


def _sub(
    name: str, inputs: list[Tensor], outputs: list[Tensor], *, root: int = -1, op: ReduceOp | None = None
) -> Call:
    tensors = inputs or outputs
    dtype = tensors[0].dtype if tensors else None
    return Call(OPERATIONS[name], inputs, outputs, dtype, root=root, op=op)


def _agree(
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
    local = local or _sub("barrier", [], [])
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
        links.local(_sub("broadcast", [], [answer], root=0), call.remaining(), for_leader=True)
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
    links.local(_sub("all_gather", [mine], list(torch.split(block, _CLAIM.size))), seconds)
    if layout.is_leader:
        rooms = list(torch.split(told, room))
        links.between(_sub("all_gather", [rooms[layout.host].clone()], rooms), seconds)
    links.local(_sub("broadcast", [], [told], root=0), seconds, for_leader=True)
    claims = []
    for rank in range(layout.size):
        at = layout.host_of[rank] * room + layout.local_of[rank] * _CLAIM.size
        claims.append((rank, *_CLAIM.unpack_from(told.numpy().data, at)))
    ranks: dict[tuple[int, ...], list[int]] = {}
    for claim in claims:
        ranks.setdefault(claim[1:], []).append(claim[0])
    most = max(map(len, ranks.values()))
    winners = [who for who in ranks.values() if len(who) == most]
    right = winners[0] if len(winners) == 1 else []  # a tie: nobody is in the right
    culprits = [r for r in range(layout.size) if r not in right]
    return MismatchError(_mismatch(claims, ""), culprits=culprits, hint=_mismatch_hint(culprits))


# --- reductions --------------------------------------------------------------------------------------


class _Reduction:
    """How a call's values are reduced in steps: first in the hosts, then between them."""

    def __init__(self, call: Call, size: int) -> None:
        assert call.op is not None
        assert call.dtype is not None
        self.op = call.op  # in the hosts
        kind = call.op.type
        self.between = ReduceOp(RedOpType.SUM) if kind in _SUMS else call.op
        self._average = size if kind is RedOpType.AVG else 0
        if self._average:
            self.op = self.between
        self.dtype = call.dtype
        self.widens = call.dtype in _NARROW and kind in _ROUNDS
        self.wide = torch.float32 if self.widens else call.dtype

    def finish(self, total: Tensor, out: Tensor) -> None:
        """From the total of all ranks to the result; both may be the same memory."""
        if self._average:
            _core.fold(total, [total], int(RedOpType.AVG), None, self._average)
        if out.data_ptr() != total.data_ptr():
            out.copy_(total)

    def fold(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """All hosts' parts into the result."""
        total = out if not self.widens else torch.empty(out.shape, dtype=self.wide)
        _core.fold(total, list(parts), self.between.code, None, len(parts))
        self.finish(total, out)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def _small_reduction(links: Links, call: Call, reduction: _Reduction, values: Tensor) -> Tensor:
    """The reduction of `values`, which are in the wide type, on all ranks."""
    part = torch.empty_like(values)
    local = _sub("reduce", [values], [part], root=0, op=reduction.op)
    size, width = part.numel() * part.element_size(), part.numel() * reduction.dtype.itemsize

    def combine(slots: list[Tensor]) -> Tensor:
        out = torch.empty(part.shape, dtype=reduction.dtype)
        reduction.fold([s[:size].view(reduction.wide) for s in slots], out)
        return bytes_of(out)

    return _agree(links, call, local, bytes_of(part), combine, width).view(reduction.dtype)


def _all_reduce(links: Links, call: Call) -> None:
    flat = _flat(call.outputs[0])
    reduction = _Reduction(call, links.layout.size)
    if flat.numel() * reduction.wide.itemsize <= INLINE:
        flat.copy_(_small_reduction(links, call, reduction, flat.to(reduction.wide)))
        return
    _agree(links, call)
    for piece in torch.split(flat, _PIECE):
        values = piece.to(reduction.wide)  # the piece itself where the type is wide enough
        links.local(_sub("reduce", [values], [values], root=0, op=reduction.op), call.remaining())
        if links.layout.is_leader:
            links.between(_sub("all_reduce", [values], [values], op=reduction.between), call.remaining())
            reduction.finish(values, piece)
        links.local(_sub("broadcast", [], [piece], root=0), call.remaining(), for_leader=True)


def _reduce(links: Links, call: Call) -> None:
    layout = links.layout
    flat = _flat(call.outputs[0] if call.outputs else call.inputs[0])
    reduction = _Reduction(call, layout.size)
    is_root = layout.rank == call.root
    if flat.numel() * reduction.wide.itemsize <= INLINE:
        result = _small_reduction(links, call, reduction, flat.to(reduction.wide))
        if is_root:
            flat.copy_(result)
        return
    _agree(links, call)
    for piece in torch.split(flat, _PIECE):
        values = piece.to(reduction.wide)
        # Only the root's tensor may change: another leader needs memory of its own.
        part = values if is_root or reduction.widens or not layout.is_leader else torch.empty_like(values)
        links.local(_sub("reduce", [values], [part], root=0, op=reduction.op), call.remaining())
        if layout.is_leader:
            where = layout.host_of[call.root]
            links.between(_sub("reduce", [part], [part], root=where, op=reduction.between), call.remaining())
            if where == layout.host:
                result = piece if is_root else torch.empty_like(piece)
                reduction.finish(part, result)
                _hand_out(links, call, [(layout.local_of[call.root], result)], None)
        elif is_root:
            _hand_out(links, call, [], piece)


def _hand_out(links: Links, call: Call, to: list[tuple[int, Tensor]], mine: Tensor | None) -> None:
    """The leader's tensors go to ranks of its host; the others get theirs into `mine`."""
    if links.layout.is_leader:
        messages = [Message(True, local, bytes_of(t)) for local, t in to if local and t.numel()]
    else:
        messages = [] if mine is None or not mine.numel() else [Message(False, 0, bytes_of(mine))]
    if messages:
        links.local_messages(messages, call.remaining(), for_leader=True)


def _reduce_scatter(links: Links, call: Call) -> None:
    layout = links.layout
    out = _flat(call.outputs[0])
    reduction = _Reduction(call, layout.size)
    if len(call.inputs) == 1:
        parts = [_flat(call.inputs[0])[r * out.numel() :][: out.numel()] for r in range(layout.size)]
    else:
        parts = [_flat(t) for t in call.inputs]
    counts = [parts[r].numel() for r in layout.order]
    if len(call.inputs) == 1 and layout.in_order:
        values = _flat(call.inputs[0]).to(reduction.wide)
    else:
        values = torch.cat([parts[r] for r in layout.order]).to(reduction.wide)
    if values.numel() * reduction.wide.itemsize <= INLINE:
        whole = _small_reduction(links, call, reduction, values)
        out.copy_(torch.split(whole, counts)[layout.order.index(layout.rank)])
        return
    _agree(links, call)
    part = torch.empty_like(values) if layout.is_leader else values
    links.local(_sub("reduce", [values], [part], root=0, op=reduction.op), call.remaining())
    if not layout.is_leader:
        _hand_out(links, call, [], out)
        return
    by_rank = dict(zip(layout.order, torch.split(part, counts), strict=True))
    blocks = list(torch.split(part, [sum(by_rank[r].numel() for r in ranks) for ranks in layout.hosts]))
    own = torch.empty_like(blocks[layout.host])
    links.between(_sub("reduce_scatter_v", blocks, [own], op=reduction.between), call.remaining())
    result = own if not reduction.widens else torch.empty(own.shape, dtype=reduction.dtype)
    reduction.finish(own, result)
    shares = torch.split(result, [by_rank[r].numel() for r in layout.members])
    out.copy_(shares[0])
    _hand_out(links, call, list(enumerate(shares)), None)


# --- copies ------------------------------------------------------------------------------------------


def _barrier(links: Links, call: Call) -> None:
    _agree(links, call)


def _broadcast(links: Links, call: Call) -> None:
    layout = links.layout
    data = bytes_of(call.outputs[0])
    source, from_here = layout.host_of[call.root], layout.local_of[call.root]
    at_home = layout.host == source
    if data.numel() <= INLINE:
        copy = data.clone()
        local = _sub("broadcast", [copy], [copy], root=from_here) if at_home else None
        result = _agree(links, call, local, copy, lambda slots: slots[source][: copy.numel()], copy.numel())
        if layout.rank != call.root:
            data.copy_(result)
        return
    _agree(links, call)
    if at_home:
        links.local(_sub("broadcast", [data], [data], root=from_here), call.remaining())
    if layout.is_leader:
        links.between(_sub("broadcast", [data], [data], root=source), call.remaining())
    if not at_home:
        links.local(_sub("broadcast", [data], [data], root=0), call.remaining(), for_leader=True)


def _all_gather(links: Links, call: Call) -> None:
    layout = links.layout
    mine = bytes_of(call.inputs[0])
    outs = parts_of(call.outputs, None, layout.size)
    sizes = [outs[r].numel() for r in layout.order]
    hosts = [sum(outs[r].numel() for r in ranks) for ranks in layout.hosts]
    total, small = sum(sizes), max(hosts) <= INLINE
    single = len(call.outputs) == 1 and layout.in_order and not small
    whole = bytes_of(call.outputs[0]) if single else torch.empty(total, dtype=_BYTE)
    places = dict(zip(layout.order, torch.split(whole, sizes), strict=True))
    blocks = list(torch.split(whole, hosts))
    block = blocks[layout.host]
    gather = _sub("all_gather_v", [mine], [places[r] for r in layout.members])
    if small:

        def combine(slots: list[Tensor]) -> Tensor:
            return torch.cat([slot[:size] for slot, size in zip(slots, hosts, strict=True)])

        whole.copy_(_agree(links, call, gather, block, combine, total))
    else:
        _agree(links, call)
        links.local(gather, call.remaining())
        if layout.is_leader:
            links.between(_sub("all_gather_v", [block], blocks), call.remaining())
        begin = sum(hosts[: layout.host])
        for rest in (whole[:begin], whole[begin + block.numel() :]):
            if rest.numel():
                links.local(_sub("broadcast", [rest], [rest], root=0), call.remaining(), for_leader=True)
    if not single:
        for rank, out in enumerate(outs):
            out.copy_(places[rank])


def _straight(links: Links, call: Call) -> None:
    _agree(links, call)
    links.straight(call)


_RUN: dict[str, Callable[[Links, Call], None]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _straight,
    "all_to_all_v_single": _straight,
    "all_to_all": _straight,
    "barrier": _barrier,
    "scatter": _straight,
    "gather": _straight,
    "gather_single": _straight,
}

OPERATIONS_HERE = frozenset(_RUN)
