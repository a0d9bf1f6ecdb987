"""Operations of ranks that share no memory, over one native transport (csrc/transport).

Every collective begins with the exchange of slots, by which the ranks compare what they call; few data
travel along (csrc/transport/collectives.hpp), so a small collective is one message each way. Larger
reductions and broadcasts run in chunks in the native core. Everything else is composed of messages
(comms/execution/composed/completion.py), all of which are under way at once.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from unicomm import _core
from unicomm._core import FaultCode
from unicomm.backends.bootstrap import addresses
from unicomm.backends.out_of_band import (
    COMPARE,
    OutOfBandBackend,
    SignatureCheck,
    Sockets,
    checks_signatures,
    frame_of,
)
from unicomm.comms.backend import Exchange, HasFastPath, OpensExchange, Reconfigures, Setup
from unicomm.comms.failures.faults import SIZES, Claim, Fault
from unicomm.comms.operations.call import Call, Message
from unicomm.comms.operations.reduction import RedOpType

from .messages import TransportExchange, start
from .native_call import has_native_form, input_bytes, run_native
from .supervisor import Supervisor

_log = logging.getLogger("unicomm")
_LEAVE = 2.0  # seconds in which the system takes what was sent, when the communicator is closed
_CHUNK = 1 << 18  # bytes of a share that are folded, or passed on, at once
_MOST_CHUNKS = 256  # of a share; larger ones have larger chunks
_FOREVER = 1e12
_COMMON = 40  # bytes of a slot's head that all ranks have in common
_FACTOR = struct.Struct("<d16x")  # what follows them
kept: list[object] = []  # memory that may still be touched, of communicators whose end took too long

#: Collectives that Python code runs whose data, if they are few, travel in the slots.
_IN_SLOTS = frozenset(
    {"all_reduce", "reduce", "all_gather", "all_gather_v", "gather", "gather_single", "reduce_scatter_single"}
)
#: Those of them of which every rank needs all data.
_ALL_NEED = frozenset({"all_reduce", "all_gather", "all_gather_v"})
_MOST_OF_ROOTED = 4096  # bytes of the others that travel in slots
_MOST_AS_TREE = 16384  # bytes of a broadcast that is a tree of messages


class TransportBackend(OutOfBandBackend, OpensExchange, HasFastPath, Reconfigures):
    """A backend whose messages a native transport moves.

    Attributes:
        transport: the engine, with its connections.
        supervisor: of the fast path.
    """

    receives_from_any = overlaps = True

    def __init__(self, setup: Setup, transport: _core.Transport, sockets: Sockets) -> None:
        """`sockets`: those on which the ranks tell each other of failures."""
        self.transport = transport
        self._rank, self._size = setup.rank, setup.size
        self._most_in_slot = _core.most_in_slot(setup.size)
        self._dropped = False
        self._memory: object = ()  # of the operation that runs
        compares = checks_signatures(setup) and setup.size > 1
        self._slots = SlotCheck(transport, setup.rank, setup.size) if compares else None
        super().__init__(setup, [sockets], self._slots)
        try:
            self.supervisor = Supervisor(self, compares)
        except BaseException:  # without descriptors
            super().close()  # so that others hear of it
            raise

    @classmethod
    def reachable_at(cls, hints: Mapping[str, Any]) -> str:
        return addresses.reachable_at(hints["interface"], hints["hostname"])

    def _use(self, transport: _core.Transport) -> None:
        """Takes another transport before the ranks are connected."""
        self._drop()
        self.transport, self._dropped = transport, False
        if self._slots is not None:
            self._slots.transport = transport
        self.supervisor = Supervisor(self, self._slots is not None)

    def close(self) -> None:
        if self.channel.fault is None and not self._dropped:
            try:
                self.transport.flush(_LEAVE)
            except RuntimeError as error:  # of a connection to a rank that has left already
                _log.debug("communicator '%s' at its end: %s", self.name, error)
        self.supervisor.native.close()
        super().close()
        self._drop()

    def forget(self) -> None:
        self.transport.forget()
        self.supervisor.native.close()
        super().forget()

    def _interrupt(self) -> None:
        self.transport.stop()
        super()._interrupt()

    def _drop(self) -> None:
        if not self._dropped:
            self._dropped = True
            if not self.transport.drop():
                kept.append((self.transport, self._memory))

    # --- the fast path -----------------------------------------------------------------------------------

    def fast_path(self, recorder: _core.Recorder, index: int, timeout: float) -> _core.FastPath:
        self.supervisor.fast = fast = _core.FastPath(self.supervisor.native, recorder, index, timeout)
        return fast

    def raise_fault(self, fault: Any, timeout: float) -> NoReturn:
        if self.supervisor.fast is not None and self.supervisor.fast.failed is not None:
            self._memory = self.supervisor.fast.failed
        if FaultCode(fault[0]) is FaultCode.MISMATCH and self.channel.fault is None:
            assert self._slots is not None
            self._slots.compare_last()
        try:
            self.check_fault()
            raise self.failure(RuntimeError(fault[3]), self.supervisor.awaited())
        finally:
            self.channel.end()

    # --- messages ----------------------------------------------------------------------------------------

    def exchange(self, messages: Sequence[Message], timeout: float) -> None:
        self.supervisor.native.wait_idle()
        # Receives first: what arrives then has its place.
        ordered = sorted(messages, key=lambda m: m.send)
        with self._in_messages(ordered, timeout, COMPARE) as awaits:
            self._memory = ordered
            running = _core.TransportMessages(self.transport)
            for number, message in enumerate(ordered):
                start(running, number, message)
            under_way, over = dict(enumerate(awaits)), []
            while under_way:
                finished = running.wait(_FOREVER, False)
                if finished is None:
                    raise RuntimeError("the communicator has ended")
                for number, _, _ in finished:  # others that ask where this rank is do not hear of it any more
                    awaits.remove(under_way.pop(number))
                over += finished
            for number, peer, length in over:
                self.check_size(ordered[number], peer, length)
            self.keep()

    def check_size(self, message: Message, peer: int, length: int) -> None:
        """Raises on all ranks if a receive got a message of another size."""
        expected = message.tensor.nbytes
        if message.send or length == expected:
            return
        self.size_differs(peer, expected, length)
        self.check_fault()

    def size_differs(self, peer: int, expected: int, length: int) -> None:
        """Breaks the communicator: a receive of `expected` bytes got a message of `length` bytes."""
        claim = Claim(self._rank, root=peer, amount=expected, extra=length)
        both = (self._rank, peer)
        self.channel.give_up(Fault(FaultCode.MISMATCH, self._rank, both, detail=SIZES, claims=(claim,)))

    def open_exchange(self) -> Exchange:
        self.supervisor.native.wait_idle()
        opened = TransportExchange(self, self.transport, self.check_size)
        self._memory = opened.messages
        return opened

    # --- collectives -------------------------------------------------------------------------------------

    def collective(self, call: Call, run: Callable[[], None]) -> None:
        native = self.supervisor.native
        if self._runs_natively(call):
            native.wait_idle()  # of another thread: after a fault the transport is closed, which it may use
            self.check_fault()
            self.keep(*call.inputs, *call.outputs)
            fault = run_native(native, call)
            if fault is not None:
                self.raise_fault(fault, call.timeout)
            self.keep()
            return
        native.wait_idle()
        with self._in_collective(call) as number:
            self.keep(*call.inputs, *call.outputs)
            slots = self._slots
            if slots is None:
                run()
            elif (given := self._given(call)) is None:
                slots.check(call, number)
                self._check_given_up(number)
                run()
            else:
                slots.check_with(call, number, given)
                self._check_given_up(number)
                self._take(call)
        self.keep()

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keeps tensors of the operation that runs, which may be touched after it has failed."""
        self._memory = tensors

    def _runs_natively(self, call: Call) -> bool:
        """Whether the native core runs the whole call: the same on all ranks that call the same."""
        if self._current is not None or not has_native_form(call):  # it may be a part of another operation
            return False
        return self.supervisor.native.fits(call.operation.code, input_bytes(call))

    def _check_given_up(self, number: int) -> None:
        """Raises the fault if other ranks gave this collective up, whose slots this rank got nevertheless.

        A fault that a rank found after it had completed the collective is left to the next operation: another
        rank may have finalized since.
        """
        self.channel.catch_up()
        fault = self.channel.fault
        if fault is not None and fault.after < number:
            self.check_fault()

    def _given(self, call: Call) -> tuple[int, int] | None:
        """Returns what this rank gives, as address and bytes, if the call's data travel in the slots.

        All ranks come to the same answer, if they call the same.
        """
        if call.name not in _IN_SLOTS or call.wire is not None or call.contributions is not None:
            return None
        tensor = call.inputs[0]
        most = self._most_in_slot if call.name in _ALL_NEED else _MOST_OF_ROOTED
        # Those of an all_gather_v have different sizes, of which each rank knows all.
        sizes = [t.nbytes for t in call.outputs] if call.name == "all_gather_v" else [tensor.nbytes]
        if max(sizes) > most or (call.op is not None and not _folds(call)):
            return None
        return tensor.data_ptr(), tensor.nbytes

    def _take(self, call: Call) -> None:
        """Writes the outputs of a call whose data travelled in the slots."""
        transport, rank = self.transport, self._rank
        if call.op is not None:
            if call.root in (-1, rank):
                out, all_bytes = call.outputs[0], call.inputs[0].nbytes
                at = rank * out.nbytes if call.name == "reduce_scatter_single" else 0
                place = out.data_ptr(), out.nbytes, at, all_bytes
                transport.fold_slots(*place, call.dtype_code, call.op.code, self._slots_factors(call))
        elif call.outputs:
            outputs = call.outputs
            if len(outputs) == 1:  # one tensor with all parts
                part = outputs[0].nbytes // self._size
                places = [(outputs[0].data_ptr() + r * part, part) for r in range(self._size)]
            else:
                places = [(t.data_ptr(), t.nbytes) for t in outputs]
            for source, (address, nbytes) in enumerate(places):
                transport.take_slot(source, address, nbytes, 0, nbytes)

    def _slots_factors(self, call: Call) -> list[float]:
        assert call.op is not None
        if call.op.type != RedOpType.PREMUL_SUM:
            return []
        assert self._slots is not None  # else the operation is composed
        return self._slots.factors()

    def runs(self, call: Call) -> bool:
        if self._size == 1:
            return False
        if call.name == "barrier":
            return False  # a composed one, unless the comparison was a barrier already
        if call.op is not None:
            return call.op.type != RedOpType.PREMUL_SUM or self._slots is not None
        return call.outputs[0].nbytes > _MOST_AS_TREE

    def run(self, call: Call) -> None:
        getattr(self, f"_{call.name}")(call)

    def _broadcast(self, call: Call) -> None:
        data = call.outputs[0]
        share = data.nbytes // (self._size - 1)
        self.transport.broadcast(data.data_ptr(), data.nbytes, call.root, _chunk(share))

    def _all_reduce(self, call: Call) -> None:
        flat = call.outputs[0].detach().reshape(-1)
        others = [r for r in range(self._size) if r != self._rank]
        shares = list(flat.tensor_split(self._size))
        self._reduce_shares(call, shares, shares[self._rank], others, others)

    def _reduce(self, call: Call) -> None:
        flat = call.inputs[0].detach().reshape(-1)
        shares = list(flat.tensor_split(self._size))
        if call.root == self._rank:
            others = [r for r in range(self._size) if r != self._rank]
            self._reduce_shares(call, shares, shares[self._rank], [], others)
        else:  # only the root's tensor may change
            self._reduce_shares(call, shares, torch.empty_like(shares[self._rank]), [call.root], [])

    def _reduce_scatter(self, call: Call) -> None:
        out = call.outputs[0].detach().reshape(-1)
        if len(call.inputs) == 1:
            whole = call.inputs[0].detach().reshape(-1)
            shares = list(whole.chunk(self._size)) if out.numel() else [out] * self._size
        else:
            shares = [t.detach().reshape(-1) for t in call.inputs]
        own = shares[self._rank]
        if out.data_ptr() != own.data_ptr() and any(_overlap(out, share) for share in shares):
            shares = [share.clone() for share in shares]
        self._reduce_shares(call, shares, out, [], [])

    _reduce_scatter_single = _reduce_scatter_v = _reduce_scatter

    def _reduce_shares(
        self, call: Call, shares: list[torch.Tensor], out: torch.Tensor, to: list[int], back: list[int]
    ) -> None:
        assert call.op is not None
        self._memory = [*call.inputs, *call.outputs, *shares, out]
        largest = max(share.nbytes for share in shares)
        self.transport.reduce(
            [(share.data_ptr(), share.nbytes) for share in shares],
            out.data_ptr(),
            call.dtype_code,
            call.op.code,
            self._slots_factors(call),
            to,
            back,
            _chunk(largest),
        )


class SlotCheck(SignatureCheck):
    """A comparison of signatures by the transport's slots, which may carry data of the call as well."""

    def __init__(self, transport: _core.Transport, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.transport = transport

    def check(self, call: Call, number: int) -> None:
        self.check_with(call, number, (0, 0))
        self.check_pairs(call)

    def check_with(self, call: Call, number: int, given: tuple[int, int]) -> None:
        """Compares as `check` does, and gives data to the other ranks: address and bytes."""
        head = frame_of(call, number)
        if call.op is not None and call.op.factor is not None:
            head = head[:_COMMON] + _FACTOR.pack(call.op.factor)
        if not self.transport.gather(head, *given):
            self.compare_last()

    def compare_last(self) -> None:
        """Raises `MismatchError` if the ranks' slots differ."""
        zeros = bytes(_FACTOR.size)
        self.compare([self.transport.slot_head(r)[:_COMMON] + zeros for r in range(self._size)])

    def factors(self) -> list[float]:
        """Returns the factor of every rank, after a comparison of a PREMUL_SUM."""
        return [_FACTOR.unpack(self.transport.slot_head(r)[_COMMON:])[0] for r in range(self._size)]

    def all_gather(self, mine: bytes) -> list[bytes]:
        kept = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self.transport.gather(bytes(_COMMON + _FACTOR.size), kept.data_ptr(), len(mine))
        return [self.transport.slot_data(r) for r in range(self._size)]


def _folds(call: Call) -> bool:
    """Whether the core has the reduction."""
    assert call.op is not None
    return _core.fold_defined(call.dtype_code, call.op.code)


def _chunk(share: int) -> int:
    return max(_CHUNK, (share // _MOST_CHUNKS + 15) & ~15)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
