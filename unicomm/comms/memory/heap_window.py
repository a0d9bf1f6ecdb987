"""HeapWindow: a window over symmetric memory, with all that the SHMEM library offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unicomm.comms.errors import CommTimeoutError
from unicomm.comms.execution.engine import Engine
from unicomm.comms.execution.one_sided import fail, issue
from unicomm.comms.operations.dtypes import code_of
from unicomm.comms.operations.numbers import WORD, whole_number
from unicomm.comms.operations.symmetric_table import Capability, Compare, SignalOp
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.work import Work

from .initialize import initialize
from .symmetric import SymmetricMemory, attached
from .window import Window, WindowAccess, WindowAttr

if TYPE_CHECKING:
    from unicomm.comms.options import Hints, Timeout

_LINE = 8  # words, so that counters of different ranks do not share a cache line
_BIAS = 1 << 64


class HeapWindow(Window):
    """A window over symmetric memory. Its signal counters are a tensor in the same memory."""

    def __init__(self, memory: SymmetricMemory, timeout: Timeout = None) -> None:
        super().__init__(memory.engine)
        self._memory = memory
        self._waited = [0] * memory.size
        self._place_at: tuple[int, int, int] | None = None  # address, elements, dtype of the tensor
        self._pad = memory.allocate(memory.size * _LINE * 8, timeout)
        self._pad.zero_()
        self.barrier(False, timeout=timeout)  # before any rank signals
        memory.windows.add(self)

    @classmethod
    def of(cls, engine: Engine, tensor: Any, timeout: Timeout) -> HeapWindow:
        """Makes the window. Collective. Refuses a tensor that cannot be opened before anything happens."""
        if tensor is not None and engine.symmetric is None:
            engine.invalid(
                "new_window",
                "tensor is not in symmetric memory, which the communicator does not have yet",
                "make it with unicomm.symm.init(comm) and unicomm.symm.empty(..., comm=comm) on all ranks",
            )
        if tensor is not None and (memory := attached(engine)) is not None:
            memory.check_symmetric("new_window", "tensor", tensor)
        return cls(initialize(engine, timeout=timeout), timeout)

    def _check_window(self, value: Any) -> torch.Tensor:
        return self._memory.check_symmetric("new_window", "tensor", value)

    def _attach(self, tensor: torch.Tensor, timeout: Timeout) -> None:
        def job(limit: float) -> None:
            self._memory.meet(limit, "new_window", [tensor])

        issue(self._engine, "new_window", job, outputs=[tensor], timeout=timeout)
        self._place_at = tensor.data_ptr(), tensor.numel(), code_of(tensor.dtype)

    def _detach(self) -> None:
        self._place_at = None

    def lose_tensor(self) -> None:
        """Forgets the tensor, which was freed: its memory may belong to another one soon."""
        self._place_at, self._tensor, self._lost = None, None, True

    def free(self, timeout: Timeout = None) -> None:
        self._open("symm_free")
        self._engine.refuse_capture("symm_free")
        self._memory.free(self._pad, timeout)
        self._freed, self._tensor = True, None
        self._detach()

    def get_attr(self, peer_rank: int) -> WindowAttr:
        attr = super().get_attr(peer_rank)
        direct = Capability.POINTER in self._memory.capabilities
        return WindowAttr(WindowAccess.UNIFIED) if direct else attr

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        tensor = self._registered("new_window")
        self._memory.require("new_window", Capability.POINTER)
        return self._memory.remote(tensor, self._peer("new_window", "rank", rank))

    # --- data and signals -------------------------------------------------------------------------------

    def _short_move(self, op: str, *arguments: Any) -> Work | None:
        if self._place_at is None:
            return None
        code = OPERATIONS[op].code
        return self._fast_done(op, self._memory.fast.move(op, code, op == "put", *arguments, *self._place_at))

    def _fast_done(self, op: str, done: Any, source: int = -1) -> Work | None:
        """Returns the Work of a fast path, or None if it did not take the call; raises its error."""
        if isinstance(done, tuple):
            fail(self._engine, op, lambda limit: check_wait(self._memory, done[0], source, limit))
        return done or None

    def signal(
        self, peer_rank: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        if not self._freed:
            word = self._pad.data_ptr() + self._memory.rank * _LINE * 8
            code = OPERATIONS["signal"].code
            done = self._memory.fast.signal("signal", code, peer_rank, async_op, hints, timeout, word)
            if work := self._fast_done("signal", done):
                return work
        return super().signal(peer_rank, async_op, hints, timeout)

    def wait_signal(
        self, peer_rank: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        # Two threads that wait for one rank wait for different signals.
        with self._engine.order:
            if not self._freed and type(peer_rank) is int and 0 <= peer_rank < self._memory.size:
                word = self._pad.data_ptr() + peer_rank * _LINE * 8
                code, number = OPERATIONS["wait_signal"].code, self._waited[peer_rank] + 1
                call = (code, peer_rank, async_op, hints, timeout, word, number)
                done = self._memory.fast.wait_signal("wait_signal", *call)
                if work := self._fast_done("wait_signal", done, peer_rank):
                    self._waited[peer_rank] += 1
                    return work
        return super().wait_signal(peer_rank, async_op, hints, timeout)

    def _moving(self, op: str, tensor: torch.Tensor, start: int, peer: int) -> Callable[[float], None]:
        memory, own = self._memory, self._registered(op)
        memory.require(op, Capability.PUT_GET)
        address = own.data_ptr() + start * own.element_size()

        def job(limit: float) -> None:
            if self._tensor is not own:  # another thread has freed it since the call
                self._registered(op)
            if tensor.numel():
                memory.transfer(op == "put", [(tensor.data_ptr(), address, tensor.nbytes, peer)], limit)

        return job

    def _signalling(self, peer: int) -> Callable[[float], None]:
        memory = self._memory
        memory.require("signal", Capability.SIGNAL)
        word = self._pad.data_ptr() + memory.rank * _LINE * 8

        def job(limit: float) -> None:
            memory.check(memory.domain.put_signal(0, 0, 0, word, 1, SignalOp.ADD, peer, 0), limit)

        return job

    def _waiting(self, peer: int) -> Callable[[float], None]:
        memory = self._memory
        memory.require("wait_signal", Capability.SIGNAL)
        word = self._pad.data_ptr() + peer * _LINE * 8

        def job(limit: float) -> None:
            if memory.counts_on_device:
                memory.domain.wait_next(word, word + 8, peer, limit)
                return
            wait_for(memory, word, Compare.GE, self._waited[peer] + 1, peer, limit, True)
            self._waited[peer] += 1

        return job

    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        self._open("symm_barrier")

        def job(limit: float) -> None:
            self._memory.meet(limit, "symm_barrier")

        return self._issue("symm_barrier", job, -1, async_op, hints, timeout)

    # --- atomics ----------------------------------------------------------------------------------------

    def fetch_add(self, rank: int, offset_nelems: int, value: int, timeout: Timeout = None) -> int:
        done = self._short_atomic("fetch_add", rank, offset_nelems, value, None, timeout)
        if done is not None:
            return done
        address, signed = self._word("fetch_add", offset_nelems)
        words = (address, self._value("fetch_add", "value", value))
        return self._atomic("fetch_add", rank, words, signed, timeout)

    def compare_swap(
        self, rank: int, offset_nelems: int, expected: int, value: int, timeout: Timeout = None
    ) -> int:
        done = self._short_atomic("compare_swap", rank, offset_nelems, expected, value, timeout)
        if done is not None:
            return done
        address, signed = self._word("compare_swap", offset_nelems)
        old, new = (self._value("compare_swap", *of) for of in (("expected", expected), ("value", value)))
        return self._atomic("compare_swap", rank, (address, old, new), signed, timeout)

    def _short_atomic(self, op: str, *arguments: Any) -> int | None:
        """Returns the old value if the fast path takes the call, else None."""
        if self._place_at is None:
            return None
        swaps = op == "compare_swap"
        done = self._memory.fast.atomic(OPERATIONS[op].code, swaps, *arguments, *self._place_at)
        if isinstance(done, tuple):
            self._fast_done(op, done)
        return None if done is False else int(done)

    def _value(self, op: str, name: str, value: int) -> int:
        """The number as an unsigned word."""
        with self._engine.located(op):
            return whole_number(name, value, *WORD) % _BIAS

    def _word(self, op: str, offset: Any) -> tuple[int, bool]:
        tensor = self._registered(op)
        self._memory.require(op, Capability.ATOMICS)
        if tensor.dtype not in (torch.int64, torch.uint64):
            self._engine.invalid(op, f"the window is of {tensor.dtype}", "atomics need int64 or uint64")
        start = self._offset(op, offset)
        if start >= tensor.numel():
            self._engine.invalid(op, f"element {start} of a window of {tensor.numel()}", "count from 0")
        return tensor.data_ptr() + 8 * start, tensor.dtype == torch.int64

    def _atomic(self, op: str, rank: int, words: tuple[int, ...], signed: bool, timeout: Timeout) -> int:
        peer = self._peer(op, "rank", rank)
        results = []

        def job(limit: float) -> None:
            fault, before = self._memory.atomic(op, words, peer, limit)
            self._memory.check(fault, limit)
            results.append(before)

        issue(self._engine, op, job, peer=peer, timeout=timeout)
        before = int(results[0])
        return before - _BIAS if signed and before >= _BIAS // 2 else before


def wait_for(
    memory: SymmetricMemory, word: int, compare: Compare, value: int, source: int, limit: float, only: bool
) -> None:
    """Waits until this rank's word at `address` compares as asked; errors name rank `source`.

    `only`: no other rank can make it so.
    """
    fault = memory.domain.wait_signal(word, compare, value, source if only else ~source, limit, 0)
    check_wait(memory, fault, source, limit)


def check_wait(memory: SymmetricMemory, fault: Any, source: int, limit: float) -> None:
    """Raises the error of a wait for rank `source` that returned a fault."""
    try:
        memory.check(fault, limit)
    except CommTimeoutError as error:
        if error.culprits == (source,):
            raise error.again(f"rank {source} did not signal within {limit:g} s") from None
        raise
