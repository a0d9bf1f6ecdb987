"""Completion: runs collectives that a backend lacks, composed once for all backends.

`run(group, call)` gives the call to the backend if its capabilities cover it. Otherwise the call is composed
from smaller ones, down to `Backend.exchange`, which every backend has:

    reductions      all-to-all of bytes, fold in the native core, all-gather: the traffic of a ring, and
                    the same bits as the shared-memory backend for every element type and operation;
                    small ones by one all-gather and a fold
    v-variants, all-to-all, gather, scatter, all-gather      one exchange
    broadcast       binomial tree of exchanges
    barrier         dissemination (log2 n rounds of empty exchanges)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from unicomm import _core
from unicomm.comms.backend import Backend, Capabilities, OpensExchange, RunsCollectives
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.execution.device import fold as device_fold
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.parts import byte_splits, bytes_of, copy_memory, parts_of
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.operations.wire import Wire

from . import encoded
from .encoded import Codec
from .exchanges import AtOnce, Traffic, overlapping, trade

_SMALL = 4096  # bytes up to which one round trip beats less traffic
_VERDICT = 10.0  # seconds after a deadline in which a backend finds out which ranks are missing
_BYTE = torch.uint8
_64_BITS = (1 << 64) - 1


class Group:
    """A backend, and this rank's place in it."""

    __slots__ = ("backend", "capabilities", "native", "near", "rank", "size")

    def __init__(self, backend: Backend, rank: int, size: int, near: Collection[int] = ()) -> None:
        """`near`: the ranks to which data travel as they are, whatever format they have on the wire."""
        self.backend = backend
        self.near = frozenset(near) | {rank}
        self.native = backend if isinstance(backend, RunsCollectives) else None
        self.capabilities = backend.capabilities
        self.rank = rank
        self.size = size


def is_native(capabilities: Capabilities, call: Call) -> bool:
    """Whether the backend runs `call` itself."""
    if call.name not in capabilities.operations or call.contributions is not None:
        return False
    if call.wire is not None and not capabilities.encodes:
        return False
    if call.op is None:
        return True
    if call.dtype in capabilities.reduce_dtypes and call.op.type in capabilities.reduce_ops:
        return True
    return (call.dtype, call.op.type) in capabilities.reductions


def collective(group: Group, call: Call) -> None:
    """Runs a collective, with what the backend does around each of them."""
    if group.native is None:
        run(group, call)
    else:
        group.native.collective(call, lambda: run(group, call))


def run(group: Group, call: Call) -> None:
    """Runs a collective; returns when its outputs are written."""
    native = group.native
    capabilities = group.capabilities
    covered = not capabilities.moves_data or is_native(capabilities, call)
    if native is not None and covered and native.runs(call):
        if capabilities.bytes_only and call.op is None and call.dtype is not None:
            call = _as_bytes(call)
        native.run(call)
    elif group.size == 1 and call.contributions is None:
        _alone(call)
    else:
        compose(group, call)


def compose(group: Group, call: Call) -> None:
    """Runs a collective of several ranks by smaller ones, even if the backend could run it."""
    if call.contributions is not None:
        _contributed(group, call, call.contributions)
    elif call.wire is not None:
        _encoded(group, call, call.wire)
    else:
        if group.capabilities.checks_mismatch:
            _compare(group, call)
        _COMPOSED[call.name](group, call)


def exchange(group: Group, messages: list[Message], timeout: float) -> None:
    """Runs sends and receives together."""
    group.backend.exchange([as_sent(group, m) for m in messages], timeout)


def as_sent(group: Group, message: Message) -> Message:
    """The message with its tensor as bytes, if the backend wants bytes."""
    return message._replace(tensor=bytes_of(message.tensor)) if group.capabilities.bytes_only else message


def _as_bytes(call: Call) -> Call:
    inputs, outputs = [bytes_of(t) for t in call.inputs], [bytes_of(t) for t in call.outputs]
    in_splits = out_splits = None
    if call.in_splits is not None:
        in_splits = byte_splits(call.in_splits, inputs[0].numel())
    if call.out_splits is not None:
        out_splits = byte_splits(call.out_splits, outputs[0].numel())
    return call.changed(
        inputs=inputs, outputs=outputs, dtype=_BYTE, in_splits=in_splits, out_splits=out_splits
    )


def _all_to_all(group: Group, call: Call) -> None:
    """Moves all parts in one exchange."""
    ins = parts_of(call.inputs, call.in_splits, group.size)
    outs = parts_of(call.outputs, call.out_splits, group.size)
    _swap(group, call, ins, outs, _tells_sizes(group))


def _tells_sizes(group: Group) -> bool:
    """Whether messages alone tell what ranks exchange: then empty parts are messages, too."""
    return group.capabilities.empty_parts and not group.capabilities.checks_mismatch


def _swap(
    group: Group, call: Call, ins: list[torch.Tensor], outs: list[torch.Tensor], empty: bool = False
) -> None:
    if messages := _trade(group, ins, outs, empty):
        group.backend.exchange(messages, call.remaining())


def _trade(
    group: Group, ins: list[torch.Tensor], outs: list[torch.Tensor], empty: bool = False
) -> list[Message]:
    """Returns the messages of a swap, and copies this rank's own part."""
    if ins and outs:
        copy_memory(outs[group.rank], ins[group.rank])
    return trade(range(group.size), group.rank, ins, outs, empty)


def _all_gather(group: Group, call: Call) -> None:
    _swap(group, call, [bytes_of(call.inputs[0])] * group.size, parts_of(call.outputs, None, group.size))


def _gather_or_scatter(group: Group, call: Call) -> None:
    """Moves one part between the root and each rank, to the root or away from it."""
    scatters = call.name == "scatter"
    own, parts = (call.outputs, call.inputs) if scatters else (call.inputs, call.outputs)
    mine = bytes_of(own[0])
    if group.rank == call.root:
        of_all = parts_of(parts, None, group.size)
        to, source = (mine, of_all[group.rank]) if scatters else (of_all[group.rank], mine)
        copy_memory(to, source)
        messages = [Message.part(scatters, r, of_all[r]) for r in range(group.size) if r != group.rank]
    else:
        messages = [Message.part(not scatters, call.root, mine)]
    if mine.numel():
        group.backend.exchange(messages, call.remaining())


def _broadcast(group: Group, call: Call) -> None:
    data = bytes_of(call.outputs[0])
    if not data.numel():
        return
    relative = (group.rank - call.root) % group.size
    reach = 1
    while reach < group.size:
        if relative < reach:
            if relative + reach < group.size:
                to = (group.rank + reach) % group.size
                group.backend.exchange([Message.part(True, to, data)], call.remaining())
        elif relative < 2 * reach:
            source = (group.rank - reach) % group.size
            group.backend.exchange([Message.part(False, source, data)], call.remaining())
        reach *= 2


def _barrier(group: Group, call: Call) -> None:
    token, sink = (torch.zeros(1, dtype=_BYTE, device="cpu") for _ in range(2))
    reach = 1
    while reach < group.size:
        to, source = (group.rank + reach) % group.size, (group.rank - reach) % group.size
        group.backend.exchange(
            [Message.part(False, source, sink), Message.part(True, to, token)], call.remaining()
        )
        reach *= 2


# --- reductions -----------------------------------------------------------------------------------


def _sub(
    call: Call, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], **more: object
) -> Call:
    row = OPERATIONS[name]
    cleared = {"op": None, "wire": None, "contributions": None, "count": 0, "extra": 0}
    return call.changed(operation=row, inputs=inputs, outputs=outputs, **cleared, **more)


def _factors(group: Group, call: Call) -> list[float] | None:
    """Every rank's PREMUL_SUM factor."""
    assert call.op is not None
    if call.op.type != RedOpType.PREMUL_SUM:
        return None
    device = call.inputs[0].device
    mine = torch.tensor([call.op.factor], dtype=torch.float64, device=device)
    everyone = torch.empty(group.size, dtype=torch.float64, device=device)
    run(group, _sub(call, "all_gather_single", [mine], [everyone], dtype=torch.float64))
    return [float(f) for f in everyone]


def _fold(call: Call, out: torch.Tensor, sources: list[torch.Tensor], factors: list[float] | None) -> None:
    assert call.op is not None
    if out.device.type != "cpu":
        device_fold.fold(out, sources, call.op, factors)
        return
    if not _core.fold(out, sources, call.op.code, factors, len(sources)):
        raise UnsupportedError(
            f"{call.op} is undefined for {call.dtype}", op=call.name, hint="convert the tensor first"
        )


def _fold_shares(group: Group, call: Call, shares: list[torch.Tensor], out: torch.Tensor) -> None:
    """Sends `shares[r]` to rank r; each rank reduces the shares it receives into its `out`."""
    factors = _factors(group, call)
    gathered = [torch.empty_like(out) for _ in range(group.size)]
    gathered[group.rank] = shares[group.rank]
    _swap(group, call, [bytes_of(s) for s in shares], [bytes_of(g) for g in gathered])
    _fold(call, out, gathered, factors)


def _all_reduce(group: Group, call: Call) -> None:
    flat = call.inputs[0].detach().reshape(-1)
    if not flat.numel():
        return
    if flat.numel() * flat.element_size() <= _SMALL:
        factors = _factors(group, call)
        everyone = [torch.empty_like(flat) for _ in range(group.size)]
        run(group, _sub(call, "all_gather", [flat], everyone))
        _fold(call, flat, everyone, factors)
        return
    shares = list(flat.tensor_split(group.size))
    own = torch.empty_like(shares[group.rank])
    _fold_shares(group, call, shares, own)
    run(group, _sub(call, "all_gather_v", [own], shares))


def _reduce(group: Group, call: Call) -> None:
    flat = call.inputs[0].detach().reshape(-1)
    if not flat.numel():
        return
    # Only the root's tensor may change, so the others fold into memory of their own.
    shares = list(flat.tensor_split(group.size))
    own = torch.empty_like(shares[group.rank])
    _fold_shares(group, call, shares, own)
    if group.rank == call.root:
        others = [r for r in range(group.size) if r != group.rank and shares[r].numel()]
        messages = [Message.part(False, r, bytes_of(shares[r])) for r in others]
        copy_memory(shares[group.rank], own)
    else:
        messages = [Message.part(True, call.root, bytes_of(own))] if own.numel() else []
    if messages:
        group.backend.exchange(messages, call.remaining())


def _reduce_scatter(group: Group, call: Call) -> None:
    out = call.outputs[0].detach().reshape(-1)
    if len(call.inputs) == 1 and group.size > 1:
        shares = list(call.inputs[0].detach().reshape(-1).chunk(group.size)) if out.numel() else []
        shares = shares or [out] * group.size
    else:
        shares = [t.detach().reshape(-1) for t in call.inputs]
    _fold_shares(group, call, shares, out)


# --- contributions: several tensors of each rank --------------------------------------------------


def _contributed(group: Group, call: Call, rows: torch.Tensor) -> None:
    """Reduces all rows of all ranks."""
    assert call.op is not None
    _compare(group, call)
    flat = call.outputs[0].detach().reshape(-1)
    shares, parts = flat.tensor_split(group.size), rows.tensor_split(group.size, dim=1)
    own = torch.empty_like(shares[group.rank])
    gathered = [own.new_empty((len(rows), own.numel())) for _ in range(group.size)]
    _swap(group, call, [bytes_of(part.contiguous()) for part in parts], [bytes_of(g) for g in gathered])
    sources = [row for rows_of_one in gathered for row in rows_of_one]
    if own.numel():
        _fold(call, own, sources, None)
    if group.size == 1:
        copy_memory(flat, own)
    else:
        run(group, _sub(call, "all_gather_v", [own], list(shares)))


def _compare(group: Group, call: Call) -> None:
    """Compares signatures, if only the backend's own collectives do that, by one of them."""
    if group.native is not None and type(group.native).collective is RunsCollectives.collective:
        check = Call(OPERATIONS["barrier"], timeout=call.timeout)
        check.extra, check.deadline = hash(call.signature) & _64_BITS, call.deadline
        run(group, check)


# --- wire formats ---------------------------------------------------------------------------------


def _encoded(group: Group, call: Call, wire: Wire) -> None:
    """Runs a collective whose elements have a wire format."""
    _compare(group, call)
    codec, mine, dtype = Codec.of(call, group.rank), group.rank, call.dtype
    assert dtype is not None
    if call.name == "all_reduce":
        assert call.op is not None
        flat = call.outputs[0].detach().reshape(-1)
        with _traffic(group, call, -(-flat.numel() // group.size)) as traffic:
            encoded.all_reduce(
                codec, flat, call.op, mine, group.size, traffic, lambda: run(group, call.changed(wire=None))
            )
        return
    if call.op is not None:
        parts = [part.view(dtype) for part in parts_of(call.inputs, None, group.size)]
        lost = encoded.residuals(wire, parts)
        with _traffic(group, call, _largest(parts)) as traffic:
            codec.reduce_scatter(parts, mine, call.outputs[0].detach().reshape(-1), traffic, call.op, lost)
        return
    outs = [part.view(dtype) for part in parts_of(call.outputs, call.out_splits, group.size)]
    if len(call.inputs) == 1 and not call.operation.shared and not call.operation.splits:
        with _traffic(group, call, _largest(outs)) as traffic:
            codec.all_gather(call.inputs[0].detach().reshape(-1), mine, outs, traffic)
    else:
        ins = [part.view(dtype) for part in parts_of(call.inputs, call.in_splits, group.size)]
        # Only those of equal parts have as many chunks on all ranks.
        largest = _largest(outs) if call.name == "all_to_all_single" else 0
        with _traffic(group, call, largest, _tells_sizes(group)) as traffic:
            codec.all_to_all(ins, outs, mine, group.near, traffic)


def _largest(parts: Sequence[torch.Tensor]) -> int:
    return max(part.numel() for part in parts)


def _traffic(group: Group, call: Call, largest: int, empty: bool = False) -> AbstractContextManager[Traffic]:
    """Returns how the parts of a call travel. `largest`: elements of the largest one, alike on all ranks.
    `empty`: also empty parts, if all travel at once."""
    backend = group.backend
    if largest > encoded.CHUNK and isinstance(backend, OpensExchange) and backend.overlaps:
        # The fault channel of such a backend watches over the call's own deadline.
        return overlapping(backend, partial(_trade, group), lambda: call.remaining() + _VERDICT, call.timeout)
    return nullcontext(AtOnce(partial(_swap, group, call, empty=empty)))


def _alone(call: Call) -> None:
    """Runs a collective of a group of one rank."""
    if call.op is not None:
        factors = None if call.op.factor is None else [call.op.factor]
        _fold(call, call.outputs[0].detach(), [call.inputs[0].detach()], factors)
    elif call.inputs and call.outputs:
        copy_memory(bytes_of(call.outputs[0]), bytes_of(call.inputs[0]))


_COMPOSED: dict[str, Callable[[Group, Call], None]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "all_to_all_v_single": _all_to_all,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "scatter": _gather_or_scatter,
    "gather": _gather_or_scatter,
    "gather_single": _gather_or_scatter,
}


def composed_operations() -> frozenset[str]:
    """Names of the collectives that can be composed: all of them, as a test asserts."""
    return frozenset(_COMPOSED)
