"""Collectives whose elements travel in a wire format.

What a rank sends to another is encoded once; sums are accumulated in float32, in the order of the ranks, and
a result that all ranks need is encoded once, so that all of them decode the same bytes:

    reductions      each part goes encoded to the rank that adds it up, which adds its own part as it is
    all_reduce      the same, and the sums are encoded and gathered
    all_gather      each rank's part is encoded, also for the rank itself
    all_to_all      each part is encoded unless it stays with this rank or on its host

A part of at most `wire.SMALL` elements travels as it is. The steps are the same for ranks of a flat
communicator, for hosts, and for process groups of others; they differ in who swaps bytes with whom.

Where messages go on while this rank computes, parts go through the steps in chunks, so that a chunk is
encoded, added up and decoded while others travel. Chunks consist of whole blocks, and the random bits of an
element depend on its number in the part: the results have the same bits for any chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from unicomm import _core
from unicomm.comms.execution.device import encode as device_encode
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.parts import bytes_of, copy_memory
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.operations.wire import SMALL, Wire

from .exchanges import Finish, Traffic, nothing, run_stages

Tensor = torch.Tensor

#: Elements of a part that are encoded at a time: whole blocks of all formats.
CHUNK = 1 << 18
#: Chunks that are on their way while one is computed.
AHEAD = 3

_RESULT = -1  # the name of the part that is this rank's sum
_SUM, _AVG = int(RedOpType.SUM), int(RedOpType.AVG)


class Codec:
    """The encoding of one operation on this rank. Tensors are flat."""

    def __init__(self, wire: Wire, dtype: torch.dtype, rank: int, seq: int = 0) -> None:
        """`rank`, `seq`: of the communicator; they choose the random bits of stochastic rounding."""
        self.wire = wire
        self.dtype = dtype
        self._rank, self._seq = rank, seq
        self._keys: dict[int, int] = {}  # of random bits, by the part

    @classmethod
    def of(cls, call: Call, rank: int) -> Codec:
        assert call.wire is not None
        assert call.dtype is not None
        return cls(call.wire, call.dtype, rank, call.seq)

    # --- one tensor --------------------------------------------------------------------------------------

    def room(self, count: int, device: torch.device | None = None) -> Tensor:
        """Returns bytes for `count` encoded elements."""
        return torch.empty(self.wire.format.bytes_of(count), dtype=torch.uint8, device=device)

    def encode(
        self, values: Tensor, factor: float = 1.0, lost: Tensor | None = None, chunk: Chunk | None = None
    ) -> Tensor:
        """Returns the bytes of `values` times `factor`. `lost` is added to the values first, and replaced by
        what encoding loses of them. `chunk`: which one of a tensor the values are; None for the whole."""
        out = self.room(values.numel(), values.device)
        if values.numel():
            stochastic = self.wire.asked.seed is not None
            key = self._key(chunk) if stochastic else 0
            first = 0 if chunk is None else chunk.first
            core = _core if values.device.type == "cpu" else device_encode
            core.wire_encode(out, values, self.wire.format, factor, stochastic, key, lost, first)
        return out

    def _key(self, chunk: Chunk | None) -> int:
        """Returns the key of a tensor's random bits."""
        if chunk is None:
            return self.wire.key(self._seq, self._rank)
        if chunk.part not in self._keys:
            self._keys[chunk.part] = self.wire.key(self._seq, self._rank)
        return self._keys[chunk.part]

    def decode(self, data: Tensor, out: Tensor, add: bool = False) -> None:
        """Decodes into `out`, or adds to it."""
        if out.numel():
            core = _core if out.device.type == "cpu" else device_encode
            core.wire_decode(out, data, self.wire.format, add)

    # --- a part, which may be small, or a chunk of one ---------------------------------------------------

    def packed_room(
        self,
        count: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        chunk: Chunk | None = None,
    ) -> Tensor:
        if _encodes(count, chunk):
            return self.room(count, device)
        return torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)

    def pack(
        self, part: Tensor, factor: float = 1.0, lost: Tensor | None = None, chunk: Chunk | None = None
    ) -> Tensor:
        """Returns the bytes of a part as they travel; `lost` and `chunk` are as in `encode`."""
        if _encodes(part.numel(), chunk):
            return self.encode(part, factor, lost, chunk)
        if lost is None and factor == 1.0:
            return bytes_of(part)
        return bytes_of((with_lost(part, lost).float() * factor).to(part.dtype))

    def unpack(self, data: Tensor, out: Tensor, chunk: Chunk | None = None) -> None:
        if _encodes(out.numel(), chunk):
            self.decode(data, out)
        elif out.numel():
            copy_memory(bytes_of(out), data)

    def fold(
        self,
        packed: Sequence[Tensor],
        own: Tensor,
        mine: int,
        dtype: torch.dtype,
        chunk: Chunk | None = None,
        total: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum in float32 of packed parts of one size in their order; number `mine` is `own`.

        Args:
            dtype: of the parts that are too small to be encoded.
            total: memory for the sum.
        """
        if total is None:
            total = torch.empty(own.shape, dtype=torch.float32, device=own.device)
        for i, data in enumerate(packed):
            if i != mine and _encodes(own.numel(), chunk):
                self.decode(data, total, add=i > 0)
                continue
            term = (own if i == mine else data.view(dtype)).float()
            if i == 0:
                total.copy_(term)
            else:
                _fold(total, [total, term], _SUM)
        return total

    # --- reductions --------------------------------------------------------------------------------------

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        mine: int,
        out: Tensor,
        traffic: Traffic,
        op: ReduceOp,
        lost: Sequence[Tensor] = (),
    ) -> None:
        """Puts the reduction of everybody's part number `mine` into `out`.

        `lost`: empty, or a tensor for each part, as in `encode`.
        """
        sums = _Sums(self, parts, mine, traffic, _factor(op), lost)
        others = [part for i, part in enumerate(parts) if i != mine]
        result = torch.empty_like(out) if any(_overlap(out, part) for part in others) else out

        def take(number: int) -> Finish:
            total = sums.total(number)
            if op.type is RedOpType.AVG:
                _fold(total, [total], _AVG, len(parts))
            copy_memory(sums.cut.of(result, number), total)
            return nothing

        run_stages(sums.cut.count, AHEAD, sums.begin, take)
        if result is not out:
            copy_memory(out, result)

    def all_reduce(
        self,
        parts: Sequence[Tensor],
        mine: int,
        outs: Sequence[Tensor],
        traffic: Traffic,
        factor: float = 1.0,
        divisor: int = 1,
        lost: Sequence[Tensor] = (),
    ) -> None:
        """Puts the sums of everybody's `parts`, times `factor` and divided by `divisor`, into `outs`."""
        # What was lost of this rank's own part comes to its sum when that is encoded.
        late = bool(lost) and factor == 1.0 and parts[mine].numel() > SMALL
        sums = _Sums(self, parts, mine, traffic, factor, lost, late)
        cut = sums.cut

        def pack(number: int) -> Tensor:
            total, chunk = sums.total(number), cut.chunk(parts[mine], number, _RESULT)
            if not _encodes(total.numel(), chunk):
                if divisor > 1:
                    _fold(total, [total], _AVG, divisor)
                return bytes_of(total.to(outs[mine].dtype))
            rest = cut.of(lost[mine], number) if lost else None
            result = self.encode(total, 1.0 / divisor, rest, chunk)
            if rest is not None and factor != 1.0:
                before_factor(rest, factor)
            return result

        gather = _Gather(self, pack, mine, outs, traffic, cut)
        run_stages(cut.count, AHEAD, sums.begin, gather.begin, gather.unpack)

    # --- copies ------------------------------------------------------------------------------------------

    def all_gather(self, own: Tensor, mine: int, outs: Sequence[Tensor], traffic: Traffic) -> None:
        """Puts everybody's `own` into `outs`, this rank's too."""
        cut = Cut(outs, traffic)

        def pack(number: int) -> Tensor:
            chunk = cut.chunk(own, number, mine)
            packed = self.pack(cut.of(own, number), chunk=chunk)
            return packed if _encodes(packed.numel(), chunk) else packed.clone()

        gather = _Gather(self, pack, mine, outs, traffic, cut)
        run_stages(cut.count, AHEAD, gather.begin, gather.unpack)

    def all_to_all(
        self,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        mine: int,
        near: Collection[int],
        traffic: Traffic,
    ) -> None:
        """Sends `ins[i]` to rank i and receives `outs[i]` from it; to those in `near` as they are."""
        cut, got = Cut([*ins, *outs], traffic), dict[int, list[Tensor]]()

        def begin(number: int) -> Finish:
            sent, room = [], []
            for i, (part, out) in enumerate(zip(ins, outs, strict=True)):
                piece, place = cut.of(part, number), cut.of(out, number)
                if i in near:
                    sent.append(bytes_of(piece))
                    room.append(bytes_of(place))
                else:
                    sent.append(self.pack(piece, chunk=cut.chunk(part, number, i)))
                    room.append(
                        self.packed_room(place.numel(), place.dtype, place.device, cut.chunk(out, number, i))
                    )
            got[number] = room
            return self.swap(traffic, sent, room, mine)

        def unpack(number: int) -> Finish:
            for i, (data, out) in enumerate(zip(got.pop(number), outs, strict=True)):
                if i not in near:
                    self.unpack(data, cut.of(out, number), cut.chunk(out, number, i))
            return nothing

        run_stages(cut.count, AHEAD, begin, unpack)

    def swap(self, traffic: Traffic, ins: list[Tensor], outs: list[Tensor], mine: int) -> Finish:
        self.wire.sent += sum(part.numel() for i, part in enumerate(ins) if i != mine)
        return traffic.begin(ins, outs)


class Chunk(NamedTuple):
    """A chunk of a part.

    Attributes:
        part: the part's name: the rank whose it is, or `_RESULT`.
        elements: of the whole part.
        first: number of the chunk's first element in the part.
    """

    part: int
    elements: int
    first: int


class Cut:
    """How the parts of an operation are cut into chunks. `count`: number of chunks, on all ranks the same."""

    def __init__(self, parts: Sequence[Tensor], traffic: Traffic) -> None:
        self._size, self.count = CHUNK, 1
        if traffic.overlaps:
            self.count = max(1, -(-max(part.numel() for part in parts) // CHUNK))

    def of(self, part: Tensor, number: int) -> Tensor:
        """Returns a chunk of a part; empty if it has fewer."""
        return part if self.count == 1 else part[number * self._size : (number + 1) * self._size]

    def chunk(self, part: Tensor, number: int, name: int) -> Chunk | None:
        """Returns which chunk of a part that is; None for the whole part."""
        return None if self.count == 1 else Chunk(name, part.numel(), number * self._size)


class _Sums:
    """The parts of all ranks for the rank `mine`, added up in float32, times `factor`."""

    def __init__(
        self,
        codec: Codec,
        parts: Sequence[Tensor],
        mine: int,
        traffic: Traffic,
        factor: float,
        lost: Sequence[Tensor],
        late: bool = False,
    ) -> None:
        """`late`: the caller adds what was lost of this rank's own part."""
        self.cut = Cut(parts, traffic)
        self._codec, self._parts, self._mine, self._traffic = codec, parts, mine, traffic
        self._factor, self._lost, self._late = factor, lost, late
        self._got: dict[int, list[Tensor]] = {}  # by chunk
        self._total: Tensor | None = None

    def begin(self, number: int) -> Finish:
        """Sends a chunk of each other rank's part there."""
        cut, codec, parts, mine = self.cut, self._codec, self._parts, self._mine
        own, of_own = cut.of(parts[mine], number), cut.chunk(parts[mine], number, mine)
        empty = torch.empty(0, dtype=torch.uint8, device=own.device)
        ins, outs = [empty] * len(parts), [empty] * len(parts)
        for i, part in enumerate(parts):
            if i != mine:
                rest = cut.of(self._lost[i], number) if self._lost else None
                chunk = cut.chunk(part, number, i)
                ins[i] = codec.pack(cut.of(part, number), self._factor, rest, chunk)
                outs[i] = codec.packed_room(own.numel(), own.dtype, own.device, of_own)
        self._got[number] = outs
        return codec.swap(self._traffic, ins, outs, mine)

    def total(self, number: int) -> Tensor:
        """Returns a chunk's sum, in memory that the next one uses again."""
        cut, mine = self.cut, self._mine
        own = part = cut.of(self._parts[mine], number)
        if self._lost and not self._late:
            own = with_lost(own, cut.of(self._lost[mine], number))
        if self._factor != 1.0:
            own = own.float() * self._factor
        if self._total is None or self._total.numel() < own.numel():
            self._total = torch.empty(own.numel(), dtype=torch.float32, device=own.device)
        chunk = cut.chunk(self._parts[mine], number, mine)
        total = self._total if chunk is None else self._total[: own.numel()]
        return self._codec.fold(self._got.pop(number), own, mine, part.dtype, chunk, total)


class _Gather:
    """The parts of all ranks, which each of them packs once, in chunks, and all of them unpack."""

    def __init__(
        self,
        codec: Codec,
        pack: Callable[[int], Tensor],
        mine: int,
        outs: Sequence[Tensor],
        traffic: Traffic,
        cut: Cut,
    ) -> None:
        self._codec, self._pack, self._mine, self._outs = codec, pack, mine, outs
        self._traffic, self._cut = traffic, cut
        self._got: dict[int, list[Tensor]] = {}  # by chunk

    def begin(self, number: int) -> Finish:
        codec, cut, mine = self._codec, self._cut, self._mine
        packed, everyone = self._pack(number), []
        for i, out in enumerate(self._outs):
            place, chunk = cut.of(out, number), cut.chunk(out, number, i)
            room = codec.packed_room
            everyone.append(packed if i == mine else room(place.numel(), place.dtype, place.device, chunk))
        self._got[number] = everyone
        return codec.swap(self._traffic, [packed] * len(everyone), everyone, mine)

    def unpack(self, number: int) -> Finish:
        for i, (data, out) in enumerate(zip(self._got.pop(number), self._outs, strict=True)):
            self._codec.unpack(data, self._cut.of(out, number), self._cut.chunk(out, number, i))
        return nothing


def _encodes(count: int, chunk: Chunk | None) -> bool:
    """Whether `count` elements are encoded. A small part is not; a small chunk of a large part is."""
    return count > 0 and (count if chunk is None else chunk.elements) > SMALL


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def before_factor(lost: Tensor, factor: float) -> None:
    """Brings what was lost of values times `factor` into units of the values. A factor of 0 loses nothing."""
    if factor:
        lost.div_(factor)
    else:
        lost.zero_()


def with_lost(part: Tensor, lost: Tensor | None) -> Tensor:
    """Returns a part that is not encoded with what was lost of it before; nothing is lost any more."""
    if lost is None:
        return part
    values = part + lost
    lost.zero_()
    return values


def residuals(wire: Wire, parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns the residual of each part of an input; no tensors if there is none."""
    return [] if wire.residual is None else list(torch.split(wire.residual, [part.numel() for part in parts]))


def all_reduce(
    codec: Codec,
    flat: Tensor,
    op: ReduceOp,
    rank: int,
    size: int,
    traffic: Traffic,
    plain: Callable[[], None],
) -> None:
    """All-reduces a flat tensor among ranks of which each may swap bytes with each.

    `plain` all-reduces `flat` as it is.
    """
    residual = codec.wire.residual
    if flat.numel() <= SMALL:
        if residual is not None:
            copy_memory(flat, with_lost(flat, residual))
        plain()
        return
    shares = flat.tensor_split(size)
    lost = () if residual is None else residual.tensor_split(size)
    divisor = size if op.type is RedOpType.AVG else 1
    codec.all_reduce(shares, rank, shares, traffic, _factor(op), divisor, lost)


def _factor(op: ReduceOp) -> float:
    return 1.0 if op.factor is None else op.factor


def _fold(out: Tensor, sources: list[Tensor], op: int, n: int = 0) -> None:
    if out.device.type == "cpu":
        _core.fold(out, sources, op, None, n)
    elif op == _AVG:
        out.div_(n)
    else:
        out.copy_(sources[0] + sources[1])
