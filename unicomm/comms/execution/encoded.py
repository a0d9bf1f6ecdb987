"""Collectives whose elements travel in a wire format.

What a rank sends to another is encoded once; sums are accumulated in float32, in the order of the ranks, and
a result that all ranks need is encoded once, so that all of them decode the same bytes:

    reductions      each part goes encoded to the rank that adds it up, which adds its own part as it is
    all_reduce      the same, and the sums are encoded and gathered
    all_gather      each rank's part is encoded, also for the rank itself
    all_to_all      each part is encoded unless it stays with this rank or on its host

A part of at most `wire.SMALL` elements travels as it is. The steps are the same for ranks of a flat
communicator, for hosts, and for process groups of others; they differ in who swaps bytes with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from unicomm import _core
from unicomm.comms.operations.call import Call
from unicomm.comms.operations.parts import bytes_of
from unicomm.comms.operations.reduction import RedOpType, ReduceOp
from unicomm.comms.operations.wire import SMALL, Wire

from .device import encode as device_encode

Tensor = torch.Tensor
#: Sends `ins[i]` to the i-th rank of a circle and receives `outs[i]` from it; empty ones are left out.
Swap = Callable[[list[Tensor], list[Tensor]], None]

_SUM, _AVG = int(RedOpType.SUM), int(RedOpType.AVG)


class Codec:
    """The encoding of one operation on this rank. Tensors are flat."""

    def __init__(self, wire: Wire, dtype: torch.dtype, rank: int, seq: int = 0) -> None:
        """`rank`, `seq`: of the communicator; they choose the random bits of stochastic rounding."""
        self.wire = wire
        self.dtype = dtype
        self._rank, self._seq = rank, seq

    @classmethod
    def of(cls, call: Call, rank: int) -> Codec:
        assert call.wire is not None
        assert call.dtype is not None
        return cls(call.wire, call.dtype, rank, call.seq)

    # --- one tensor --------------------------------------------------------------------------------------

    def room(self, count: int, device: torch.device | None = None) -> Tensor:
        """Returns bytes for `count` encoded elements."""
        return torch.empty(self.wire.format.bytes_of(count), dtype=torch.uint8, device=device)

    def encode(self, values: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> Tensor:
        """Returns the bytes of `values` times `factor`. `lost` is added to the values first, and replaced by
        what encoding loses of them."""
        out = self.room(values.numel(), values.device)
        if values.numel():
            seed = self.wire.asked.seed
            key = 0 if seed is None else self.wire.key(self._seq, self._rank)
            core = _core if values.device.type == "cpu" else device_encode
            core.wire_encode(out, values, self.wire.format, factor, seed is not None, key, lost)
        return out

    def decode(self, data: Tensor, out: Tensor, add: bool = False) -> None:
        """Decodes into `out`, or adds to it."""
        if out.numel():
            core = _core if out.device.type == "cpu" else device_encode
            core.wire_decode(out, data, self.wire.format, add)

    # --- a part, which may be small ----------------------------------------------------------------------

    def packed_room(self, count: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        if count > SMALL:
            return self.room(count, device)
        return torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device)

    def pack(self, part: Tensor, factor: float = 1.0, lost: Tensor | None = None) -> Tensor:
        """Returns the bytes of a part as they travel; `lost` is as in `encode`."""
        if part.numel() > SMALL:
            return self.encode(part, factor, lost)
        if lost is None and factor == 1.0:
            return bytes_of(part)
        return bytes_of((with_lost(part, lost).float() * factor).to(part.dtype))

    def unpack(self, data: Tensor, out: Tensor) -> None:
        if out.numel() > SMALL:
            self.decode(data, out)
        elif out.numel():
            bytes_of(out).copy_(data)

    # --- reductions --------------------------------------------------------------------------------------

    def sum(
        self,
        parts: Sequence[Tensor],
        mine: int,
        swap: Swap,
        factor: float = 1.0,
        lost: Sequence[Tensor] = (),
    ) -> Tensor:
        """Returns the sum of everybody's part number `mine`, times `factor`, in float32.

        `lost`: empty, or a tensor for each part, as in `encode`.
        """
        own, size = parts[mine], len(parts)
        dtype, device = own.dtype, own.device
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        ins, outs = [nothing] * size, [nothing] * size
        for i in range(size):
            if i != mine:
                ins[i] = self.pack(parts[i], factor, lost[i] if lost else None)
                outs[i] = self.packed_room(own.numel(), dtype, device)
        self._swap(swap, ins, outs, mine)
        own = with_lost(own, lost[mine] if lost else None)
        return self.fold(outs, own if factor == 1.0 else own.float() * factor, mine, dtype)

    def fold(self, packed: Sequence[Tensor], own: Tensor, mine: int, dtype: torch.dtype) -> Tensor:
        """Returns the sum in float32 of packed parts of one size in their order; number `mine` is `own`.

        `dtype`: of the parts that are too small to be encoded.
        """
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for i, data in enumerate(packed):
            if i != mine and own.numel() > SMALL:
                self.decode(data, total, add=i > 0)
                continue
            term = (own if i == mine else data.view(dtype)).float()
            if i == 0:
                total.copy_(term)
            else:
                _fold(total, [total, term], _SUM)
        return total

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        mine: int,
        out: Tensor,
        swap: Swap,
        op: ReduceOp,
        lost: Sequence[Tensor] = (),
    ) -> None:
        """Puts the reduction of everybody's part number `mine` into `out`."""
        total = self.sum(parts, mine, swap, _factor(op), lost)
        if op.type is RedOpType.AVG:
            _fold(total, [total], _AVG, len(parts))
        out.copy_(total)

    def all_reduce(
        self,
        parts: Sequence[Tensor],
        mine: int,
        outs: Sequence[Tensor],
        swap: Swap,
        factor: float = 1.0,
        divisor: int = 1,
        lost: Sequence[Tensor] = (),
    ) -> None:
        """Puts the sums of everybody's `parts`, times `factor` and divided by `divisor`, into `outs`."""
        total = self.sum(parts, mine, swap, factor, lost)
        if divisor > 1:
            _fold(total, [total], _AVG, divisor)
        if total.numel() > SMALL:
            result = self.encode(total, lost=lost[mine] if lost else None)
            if lost and divisor != factor:
                lost[mine].mul_(divisor / factor)  # in units of the input
        else:
            result = bytes_of(total.to(outs[mine].dtype))
        self._gather(result, mine, outs, swap)

    # --- copies ------------------------------------------------------------------------------------------

    def all_gather(self, own: Tensor, mine: int, outs: Sequence[Tensor], swap: Swap) -> None:
        """Puts everybody's `own` into `outs`, this rank's too."""
        packed = self.pack(own)
        self._gather(packed if own.numel() > SMALL else packed.clone(), mine, outs, swap)

    def _gather(self, packed: Tensor, mine: int, outs: Sequence[Tensor], swap: Swap) -> None:
        everyone = [
            packed if i == mine else self.packed_room(out.numel(), out.dtype, out.device)
            for i, out in enumerate(outs)
        ]
        self._swap(swap, [packed] * len(outs), everyone, mine)
        for data, out in zip(everyone, outs, strict=True):
            self.unpack(data, out)

    def all_to_all(
        self, ins: Sequence[Tensor], outs: Sequence[Tensor], mine: int, near: Collection[int], swap: Swap
    ) -> None:
        """Sends `ins[i]` to rank i and receives `outs[i]` from it; to those in `near` as they are."""
        sent = [bytes_of(part) if i in near else self.pack(part) for i, part in enumerate(ins)]
        got = [
            bytes_of(out) if i in near else self.packed_room(out.numel(), out.dtype, out.device)
            for i, out in enumerate(outs)
        ]
        self._swap(swap, sent, got, mine)
        for i, (data, out) in enumerate(zip(got, outs, strict=True)):
            if i not in near:
                self.unpack(data, out)

    def _swap(self, swap: Swap, ins: list[Tensor], outs: list[Tensor], mine: int) -> None:
        swap(ins, outs)
        self.wire.sent += sum(part.numel() for i, part in enumerate(ins) if i != mine)


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
    swap: Swap,
    plain: Callable[[], None],
) -> None:
    """All-reduces a flat tensor among ranks of which each may swap bytes with each.

    `plain` all-reduces `flat` as it is.
    """
    residual = codec.wire.residual
    if flat.numel() <= SMALL:
        if residual is not None:
            flat.copy_(with_lost(flat, residual))
        plain()
        return
    shares = flat.tensor_split(size)
    lost = () if residual is None else residual.tensor_split(size)
    divisor = size if op.type is RedOpType.AVG else 1
    codec.all_reduce(shares, rank, shares, swap, _factor(op), divisor, lost)


def _factor(op: ReduceOp) -> float:
    return 1.0 if op.factor is None else op.factor


def _fold(out: Tensor, sources: list[Tensor], op: int, n: int = 0) -> None:
    if out.device.type == "cpu":
        _core.fold(out, sources, op, None, n)
    elif op == _AVG:
        out.div_(n)
    else:
        out.copy_(sources[0] + sources[1])
