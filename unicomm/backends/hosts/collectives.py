"""Collectives of ranks on several hosts: memory within a host, messages between hosts.

Every collective begins with the same step, so that ranks that call different things notice before a byte of a
user's tensor is written. The ranks of a host compare signatures in shared memory; one rank of each host, its
leader, exchanges a slot of fixed size with the other leaders, and tells its host the outcome. A small
operation's data travel in the slots and in the answer; it needs no further step.

Over UCX, the native core (csrc/hosts/fast.hpp) runs most collectives. What is left to this module are wire
formats, operations without a native form, and large data where hosts have different numbers of ranks.

Large data cross between hosts once. All ranks of a host take part in that, each with a share:

    all_reduce          reduce-scatter in the host, all-reduce of shares between hosts, all-gather in the host
    reduce              the same, but only the root's host folds, and its ranks send their shares to the root
    reduce_scatter ...  reduce-scatter in the host, each host's part of the sum to the rank whose it is
    broadcast           in the root's host, a share of each rank to the other hosts, all-gather in those
    all_gather ...      each rank's data to one rank of every other host, all-gather in the host
    gather, scatter, all_to_all ...     straight to the receiving rank; a small all_to_all_single is gathered

Sums, averages and products of floats of 8 and 16 bits are carried in float32 until all ranks' values are
reduced, and rounded once. Each host is folded in the order of its ranks, then the hosts in their order. Over
UCX, the native core folds small tensors of these floats in the order of all ranks.

Elements with a wire format are encoded for the way between hosts (comms/execution/composed/encoded.py). What
all_gather gathers has the same bits on all ranks, so it is encoded within the host, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from unicomm import _core
from unicomm.comms.execution.composed import encoded
from unicomm.comms.execution.composed.encoded import Codec, before_factor, residuals, with_lost
from unicomm.comms.execution.composed.exchanges import AtOnce, Traffic, trade
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.parts import bytes_of, copy_memory, parts_of
from unicomm.comms.operations.reduction import RedOpType, ReduceOp

from .first_step import INLINE, Links, first_step, sub
from .layout import Layout

Tensor = torch.Tensor

#: Elements of a large reduction that are reduced at a time, which bounds the memory that it needs.
_PIECE = 8 << 20
_BYTE = torch.uint8
_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
_ROUNDS = frozenset({RedOpType.SUM, RedOpType.PRODUCT, RedOpType.AVG, RedOpType.PREMUL_SUM})
_SUMS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


def run(links: Links, call: Call) -> None:
    """Runs a collective of all ranks."""
    _RUN[call.name](links, call)


def _inline(links: Links, call: Call, cut: bool = False) -> int:
    """Returns how many bytes of a host's data travel in the first step.

    `cut`: every rank needs a part of them only. Data with a wire format should not travel without it.
    """
    return INLINE if cut or call.wire is not None else links.inline


def _messages(links: Links, call: Call, messages: Sequence[Message]) -> None:
    """Runs messages between hosts."""
    if call.wire is not None:
        call.wire.sent += sum(message.tensor.nbytes for message in messages if message.send)
    if messages:
        links.messages(messages, call.remaining())


def _trade(peers: Sequence[int], mine: int, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Message]:
    return trade(peers, mine, [bytes_of(t) for t in ins], [bytes_of(t) for t in outs])


# --- reductions --------------------------------------------------------------------------------------


class _Reduction:
    """The reduction of a call in two steps: first in the hosts by `op`, then between them by `between`."""

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
        self.divisor = self._average or 1

    def finish(self, total: Tensor, out: Tensor) -> None:
        """Makes the result of the total of all ranks; both may be the same memory."""
        if self._average:
            _core.fold(total, [total], int(RedOpType.AVG), None, self._average)
        copy_memory(out, total)

    def fold(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduces all hosts' parts into the result."""
        total = out if not self.widens else torch.empty(out.shape, dtype=self.wide, device="cpu")
        _core.fold(total, list(parts), self.between.code, None, len(parts))
        self.finish(total, out)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def _small_reduction(links: Links, call: Call, reduction: _Reduction, values: Tensor) -> Tensor:
    """Returns the reduction of `values`, which are in the wide type, on all ranks."""
    part = torch.empty_like(values)
    local = sub("reduce", [values], [part], root=0, op=reduction.op)
    size, width = part.numel() * part.element_size(), part.numel() * reduction.dtype.itemsize

    def combine(slots: list[Tensor]) -> Tensor:
        out = torch.empty(part.shape, dtype=reduction.dtype, device="cpu")
        reduction.fold([s[:size].view(reduction.wide) for s in slots], out)
        return bytes_of(out)

    return first_step(links, call, local, bytes_of(part), combine, width).view(reduction.dtype)


def _all_reduce(links: Links, call: Call) -> None:
    flat = _flat(call.outputs[0])
    reduction = _Reduction(call, links.layout.size)
    residual = None if call.wire is None else call.wire.residual
    if flat.numel() * reduction.wide.itemsize <= _inline(links, call):
        values = with_lost(flat.to(reduction.wide), residual)
        copy_memory(flat, _small_reduction(links, call, reduction, values))
        return
    first_step(links, call)
    layout = links.layout
    scratch = torch.empty(
        min(flat.numel(), _PIECE) if reduction.widens else 0, dtype=reduction.wide, device="cpu"
    )
    for at, piece in enumerate(torch.split(flat, _PIECE)):
        values = scratch[: piece.numel()].copy_(piece) if reduction.widens else piece
        lost = None
        if residual is not None:
            rest = residual[at * _PIECE :][: piece.numel()]
            values = with_lost(values, rest)
            lost = _shares(layout, rest)[layout.local]
        part = _reduced_share(links, call, reduction, values)
        outs = _shares(layout, piece)
        if part.numel() and call.wire is not None:
            _encoded_between(links, call, reduction, part, outs[layout.local], lost)
            if lost is not None and reduction.op.factor is not None:
                before_factor(lost, reduction.op.factor)
        elif part.numel():
            _all_reduce_between(links, call, reduction, part, outs[layout.local])
        links.local(sub("all_gather_v", [outs[layout.local]], outs), call.remaining(), late=True)


def _shares(layout: Layout, values: Tensor) -> list[Tensor]:
    """Returns a share for each rank of the host, the same in every host: ranks beyond the smallest host's
    number of ranks get an empty share."""
    shares = list(values.tensor_split(layout.smallest))
    return shares + [values[:0]] * (len(layout.members) - layout.smallest)


def _reduced_share(links: Links, call: Call, reduction: _Reduction, values: Tensor) -> Tensor:
    """Returns this rank's share of `values`, reduced in the host, in new memory."""
    shares = _shares(links.layout, values)
    part = torch.empty_like(shares[links.layout.local])
    links.local(sub("reduce_scatter_v", shares, [part], op=reduction.op), call.remaining())
    return part


def _all_reduce_between(links: Links, call: Call, reduction: _Reduction, part: Tensor, out: Tensor) -> None:
    """All-reduces a share among its ranks, one of each host; each of them folds a part of it."""
    layout = links.layout
    hosts, mine = len(layout.hosts), layout.host
    peers = [ranks[layout.local] for ranks in layout.hosts]
    parts, outs = part.tensor_split(hosts), out.tensor_split(hosts)
    gathered = [parts[mine] if h == mine else torch.empty_like(parts[mine]) for h in range(hosts)]
    links.messages(_trade(peers, mine, parts, gathered), call.remaining())
    reduction.fold(gathered, outs[mine])
    links.messages(_trade(peers, mine, [outs[mine]] * hosts, outs), call.remaining())


def _encoded_between(
    links: Links, call: Call, reduction: _Reduction, part: Tensor, out: Tensor, lost: Tensor | None
) -> None:
    """The same in a wire format. Adds what is lost to `lost`."""
    layout = links.layout
    hosts, mine = len(layout.hosts), layout.host
    peers = [ranks[layout.local] for ranks in layout.hosts]
    rests = () if lost is None else lost.tensor_split(hosts)
    codec = Codec.of(call, layout.rank)
    parts, outs = part.tensor_split(hosts), out.tensor_split(hosts)

    def swap(ins: list[Tensor], outs: list[Tensor]) -> None:
        if messages := trade(peers, mine, ins, outs):
            links.messages(messages, call.remaining())

    traffic: AbstractContextManager[Traffic] = nullcontext(AtOnce(swap))
    if parts[0].numel() > encoded.CHUNK:
        traffic = links.overlapping(call, lambda ins, outs: trade(peers, mine, ins, outs))
    with traffic as between:
        codec.all_reduce(parts, mine, outs, between, divisor=reduction.divisor, lost=rests)


def _reduce(links: Links, call: Call) -> None:
    layout = links.layout
    flat = _flat(call.outputs[0] if call.outputs else call.inputs[0])
    reduction = _Reduction(call, layout.size)
    is_root = layout.rank == call.root
    if flat.numel() * reduction.wide.itemsize <= _inline(links, call, cut=True):
        result = _small_reduction(links, call, reduction, flat.to(reduction.wide))
        if is_root:
            copy_memory(flat, result)
        return
    first_step(links, call)
    home, local = layout.host_of[call.root], layout.local
    fetcher = layout.hosts[home][local] if local < layout.smallest else -1
    for piece in torch.split(flat, _PIECE):
        part = _reduced_share(links, call, reduction, piece.to(reduction.wide))
        if layout.host != home:
            if part.numel():
                links.messages([Message.part(True, fetcher, bytes_of(part))], call.remaining())
            continue
        outs = _shares(layout, piece)
        mine = outs[local] if is_root else torch.empty_like(outs[local])
        messages = []
        if part.numel():
            gathered = [part if h == home else torch.empty_like(part) for h in range(len(layout.hosts))]
            sources = [(h, layout.hosts[h][local]) for h in range(len(gathered)) if h != home]
            receives = [Message.part(False, rank, bytes_of(gathered[h])) for h, rank in sources]
            links.messages(receives, call.remaining())
            reduction.fold(gathered, mine)
            messages = [] if is_root else [Message.part(True, call.root, bytes_of(mine))]
        if is_root:
            others = [(r, out) for r, out in zip(layout.members, outs, strict=True) if r != layout.rank]
            messages = [Message.part(False, r, bytes_of(out)) for r, out in others if out.numel()]
        if messages:
            links.messages(messages, call.remaining())


def _reduce_scatter(links: Links, call: Call) -> None:
    layout = links.layout
    out = _flat(call.outputs[0])
    reduction = _Reduction(call, layout.size)
    if len(call.inputs) == 1:
        parts = [_flat(call.inputs[0])[r * out.numel() :][: out.numel()] for r in range(layout.size)]
    else:
        parts = [_flat(t) for t in call.inputs]
    lost: dict[int, Tensor] = {}
    if call.wire is not None:
        lost = dict(enumerate(residuals(call.wire, parts)))
        parts = [with_lost(part, lost.get(r)) for r, part in enumerate(parts)]
    counts = [parts[r].numel() for r in layout.order]
    if sum(counts) * reduction.wide.itemsize <= _inline(links, call, cut=True):
        values = torch.cat([parts[r] for r in layout.order]).to(reduction.wide)
        whole = _small_reduction(links, call, reduction, values)
        copy_memory(out, torch.split(whole, counts)[layout.order.index(layout.rank)].view(out.shape))
        return
    first_step(links, call)
    sums: dict[int, Tensor] = {}  # of this host, by the rank that gets them
    for ranks in _rounds(layout):
        ins = [parts[r].to(reduction.wide) for r in ranks]
        ins += [torch.empty(0, dtype=reduction.wide, device="cpu")] * (len(layout.members) - len(ranks))
        part = torch.empty_like(ins[layout.local])
        links.local(sub("reduce_scatter_v", ins, [part], op=reduction.op), call.remaining())
        if layout.local < len(ranks):
            sums[ranks[layout.local]] = part
    own = sums.pop(layout.rank)
    codec = None if call.wire is None else Codec.of(call, layout.rank)

    def room() -> Tensor:
        return torch.empty_like(own) if codec is None else codec.packed_room(own.numel(), own.dtype)

    gathered = [own if h == layout.host else room() for h in range(len(layout.hosts))]
    messages = []
    if own.numel():
        for h, ranks in enumerate(layout.hosts):
            if h != layout.host:
                messages.append(Message.part(False, ranks[layout.local % len(ranks)], bytes_of(gathered[h])))
    for r, part in sums.items():
        if part.numel():
            data = bytes_of(part) if codec is None else codec.pack(part, lost=lost.get(r))
            messages.append(Message.part(True, r, data))
    if reduction.op.factor is not None:
        for rest in lost.values():
            before_factor(rest, reduction.op.factor)
    _messages(links, call, messages)
    if codec is None:
        reduction.fold(gathered, out)
    else:
        reduction.finish(codec.fold(gathered, own, layout.host, own.dtype), out)


def _rounds(layout: Layout) -> list[tuple[int, ...]]:
    """Returns all ranks in rounds: ranks of one host, at most as many as this host has, each of which serves
    one of them."""
    n = len(layout.members)
    return [ranks[i : i + n] for ranks in layout.hosts for i in range(0, len(ranks), n)]


# --- copies ------------------------------------------------------------------------------------------


def _barrier(links: Links, call: Call) -> None:
    first_step(links, call)


def _broadcast(links: Links, call: Call) -> None:
    layout = links.layout
    data = bytes_of(call.outputs[0])
    source, from_here = layout.host_of[call.root], layout.local_of[call.root]
    at_home = layout.host == source
    if data.numel() <= _inline(links, call):
        copy = data.clone()
        local = sub("broadcast", [copy], [copy], root=from_here) if at_home else None
        given = copy if at_home else None
        result = first_step(
            links, call, local, given, lambda slots: slots[source][: copy.numel()], copy.numel()
        )
        if layout.rank != call.root:
            copy_memory(data, result)
        return
    first_step(links, call)
    if at_home:
        links.local(sub("broadcast", [data], [data], root=from_here), call.remaining())
        here = len(layout.members)
        messages = []
        for ranks in layout.hosts:
            shares = data.tensor_split(len(ranks))
            for i, share in enumerate(shares):
                if ranks is not layout.members and i % here == layout.local:
                    messages.append(Message.part(True, ranks[i], share))
        if messages:
            links.messages(messages, call.remaining())
    else:
        shares = data.tensor_split(len(layout.members))
        ranks = layout.hosts[source]
        mine = shares[layout.local]
        links.messages([Message.part(False, ranks[layout.local % len(ranks)], mine)], call.remaining())
        links.local(sub("all_gather_v", [mine], list(shares)), call.remaining(), late=True)


def _all_gather(links: Links, call: Call) -> None:
    outs = parts_of(call.outputs, None, links.layout.size)
    if call.wire is None:
        _all_gather_bytes(links, call, bytes_of(call.inputs[0]), outs)
        return
    codec, dtype = Codec.of(call, links.layout.rank), call.inputs[0].dtype
    mine = codec.pack(_flat(call.inputs[0]))
    elements = [out.view(dtype) for out in outs]
    packed = [codec.packed_room(out.numel(), dtype) for out in elements]
    _all_gather_bytes(links, call, mine, packed)
    for data, out in zip(packed, elements, strict=True):
        codec.unpack(data, out)


def _all_gather_bytes(links: Links, call: Call, mine: Tensor, outs: list[Tensor]) -> None:
    layout = links.layout
    hosts = [sum(outs[r].numel() for r in ranks) for ranks in layout.hosts]
    if max(hosts) <= _inline(links, call):
        sizes = [outs[r].numel() for r in layout.order]
        block = torch.empty(hosts[layout.host], dtype=_BYTE, device="cpu")
        places = list(torch.split(block, [outs[r].numel() for r in layout.members]))
        gather = sub("all_gather_v", [mine], places)

        def combine(slots: list[Tensor]) -> Tensor:
            return torch.cat([slot[:size] for slot, size in zip(slots, hosts, strict=True)])

        whole = first_step(links, call, gather, block, combine, sum(sizes))
        for rank, part in zip(layout.order, torch.split(whole, sizes), strict=True):
            copy_memory(outs[rank], part)
        return
    first_step(links, call)
    copy_memory(outs[layout.rank], mine)
    messages, here = [], len(layout.members)
    for h, ranks in enumerate(layout.hosts):
        if h == layout.host:
            continue
        if mine.numel():
            messages.append(Message.part(True, ranks[layout.local % len(ranks)], mine))
        fetched = [r for r in ranks[layout.local :: here] if outs[r].numel()]
        messages += [Message.part(False, r, outs[r]) for r in fetched]
    _messages(links, call, messages)
    for ranks in _rounds(layout):
        parts = [outs[r] for r in ranks]
        parts += [torch.empty(0, dtype=_BYTE, device="cpu")] * (here - len(ranks))
        links.local(sub("all_gather_v", [parts[layout.local]], parts), call.remaining(), late=True)


def _all_to_all_single(links: Links, call: Call) -> None:
    layout, mine = links.layout, bytes_of(call.inputs[0])
    if call.wire is not None or layout.largest * mine.numel() > _inline(links, call, cut=True):
        _straight(links, call)
        return
    # All get everything: that takes one step.
    blocks = [torch.empty_like(mine) for _ in range(layout.size)]
    _all_gather_bytes(links, call, mine, blocks)
    parts = torch.stack(blocks).view(layout.size, layout.size, -1)[:, layout.rank]
    bytes_of(call.outputs[0]).copy_(parts.reshape(-1))


def _straight(links: Links, call: Call) -> None:
    first_step(links, call)
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
    "all_to_all_single": _all_to_all_single,
    "all_to_all_v_single": _straight,
    "all_to_all": _straight,
    "barrier": _barrier,
    "scatter": _straight,
    "gather": _straight,
    "gather_single": _straight,
}

OPERATIONS_HERE = frozenset(_RUN)
