"""Window: one-sided access to a symmetric tensor, with torchcomms' names.

A window has a counter for each pair of ranks: `signal` adds one to the receiver's, `wait_signal` waits for
one more than it has waited for before. So signals are never lost, and nobody who signals waits.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .arrays import Array
from .errors import CommTimeoutError, MismatchError, NotReadyError
from .one_sided import issue
from .ops import OPERATIONS
from .symmetric import Capability, Compare, SignalOp, SymmetricMemory, initialize
from .work import Work

if TYPE_CHECKING:
    from .communicator import Communicator
    from .engine import Hints, Timeout

_LINE = 8  # words: counters of different ranks do not share a line of the caches
_BIAS = 1 << 64


class WindowAccess(enum.IntEnum):
    """Whether a rank and those that access its window see the same memory at once."""

    UNIFIED = 0
    SEPARATE = 1


@dataclass(frozen=True)
class WindowAttr:
    """What `Window.get_attr` returns."""

    access_type: WindowAccess


class Window:
    """Made by `Communicator.new_window`, on all ranks. Offsets and counts are in elements of its dtype.

    `put` and `signal` to one rank keep their order: who has seen the signal sees the data. Operations take
    `async_op`, `hints` and `timeout` as the communicator's do, and return a `Work`. Wrong ranks, bounds and
    dtypes raise `InvalidArgumentError` before anything is sent.
    """

    def __init__(self, memory: SymmetricMemory, timeout: Timeout = None) -> None:
        self._memory = memory
        self._engine = memory.engine
        self._tensor: torch.Tensor | None = None
        self._waited = [0] * memory.size
        self._pad: torch.Tensor | None = memory.allocate(memory.size * _LINE * 8, timeout)
        self._pad.zero_()
        self.barrier(False, timeout=timeout)  # before anybody signals

    # --- what it is for ---------------------------------------------------------------------------------

    def tensor_register(self, tensor: Array, timeout: Timeout = None) -> None:
        """Opens `tensor` to the other ranks. Collective, with the same allocation on all ranks.

        It has to be from `unicomm.symm.empty(..., comm=comm)`, or a contiguous view of such a tensor. Raises
        `MismatchError` on all ranks if they pass different ones.
        """
        self._open("new_window")
        if self._tensor is not None:
            self._memory.invalid("new_window", "a tensor is registered already", "deregister it first")
        own = self._memory.check_symmetric("new_window", "tensor", tensor)

        def job(limit: float) -> None:
            self._memory.meet(limit, "new_window", [own])

        issue(self._engine, "new_window", job, outputs=[own], timeout=timeout)
        self._tensor = own

    def tensor_deregister(self, timeout: Timeout = None) -> None:
        """Ends the others' access. Collective: when it returns nobody accesses the tensor any more."""
        self._registered("new_window")
        self.barrier(False, timeout=timeout)
        self._tensor = None

    def free(self, timeout: Timeout = None) -> None:
        """Gives the window's own memory back. Collective. Does not free the tensor."""
        pad = self._open("symm_free")
        self._memory.free(pad, timeout)
        self._pad = self._tensor = None

    def get_tensor(self) -> torch.Tensor | None:
        """This rank's registered tensor."""
        return self._tensor

    def get_size(self) -> int:
        """Bytes of the registered tensor; 0 without one."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """How `peer_rank`'s memory is seen: UNIFIED where this rank can address it."""
        self._engine.check.check_rank(OPERATIONS["new_window"], "peer_rank", peer_rank)
        direct = Capability.POINTER in self._memory.capabilities
        return WindowAttr(WindowAccess.UNIFIED if direct else WindowAccess.SEPARATE)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """`rank`'s tensor, as memory of this process. It stays mapped for as long as the result lives."""
        tensor = self._registered("new_window")
        self._memory.require("new_window", Capability.POINTER)
        rank = self._engine.check.check_rank(OPERATIONS["new_window"], "rank", rank)
        return self._memory.remote(tensor, rank)

    # --- data -------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: Array,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Writes `tensor` into `dst_rank`'s window from that element on. Done there when it has completed."""
        source, address = self._place("put", tensor, target_offset_nelems)
        return self._move("put", True, source, address, dst_rank, async_op, hints, timeout)

    def get(
        self,
        tensor: Array,
        src_rank: int,
        source_offset_nelems: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Fills `tensor` from `src_rank`'s window, from that element on."""
        target, address = self._place("get", tensor, source_offset_nelems)
        return self._move("get", False, target, address, src_rank, async_op, hints, timeout)

    def _place(self, op: str, value: Any, offset: Any) -> tuple[torch.Tensor, int]:
        """The tensor, and where in the own window; all of it fits there."""
        own = self._registered(op)
        tensor = self._memory.check_tensor(op, "tensor", value, own.dtype, writes=op == "get")
        start = self._offset(op, offset)
        if start + tensor.numel() > own.numel():
            self._memory.invalid(
                op,
                f"elements {start} to {start + tensor.numel()} of a window of {own.numel()}",
                "register a larger tensor, or move fewer elements",
            )
        return tensor, own.data_ptr() + start * own.element_size()

    def _offset(self, op: str, offset: Any) -> int:
        try:
            start = operator.index(offset)
        except TypeError:
            self._memory.invalid(op, f"offset {offset!r} is no whole number", "count in elements, from 0")
        if start < 0:
            self._memory.invalid(op, f"offset {start} is negative", "count in elements, from 0")
        return start

    def _move(
        self,
        op: str,
        put: bool,
        tensor: torch.Tensor,
        address: int,
        peer: int,
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
    ) -> Work:
        memory = self._memory
        memory.require(op, Capability.PUT_GET)
        peer = self._engine.check.check_rank(OPERATIONS[op], "dst_rank" if put else "src_rank", peer)

        def job(limit: float) -> None:
            if tensor.numel():
                memory.transfer(put, [(tensor.data_ptr(), address, tensor.nbytes, peer)], limit)

        ins, outs = ([tensor], []) if put else ([], [tensor])
        return issue(
            self._engine,
            op,
            job,
            inputs=ins,
            outputs=outs,
            peer=peer,
            async_op=async_op,
            hints=hints,
            timeout=timeout,
        )

    # --- signals ----------------------------------------------------------------------------------------

    def signal(self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Signals `peer_rank`, after what was put there before. Does not wait for it."""
        pad = self._open("signal")
        memory = self._memory
        memory.require("signal", Capability.SIGNAL)
        peer = self._engine.check.check_rank(OPERATIONS["signal"], "peer_rank", peer_rank)
        word = pad.data_ptr() + memory.rank * _LINE * 8

        def job(limit: float) -> None:
            memory.check(memory.domain.put_signal(0, 0, 0, word, 1, SignalOp.ADD, peer, 0), limit)

        return self._issue("signal", job, peer, async_op, hints, timeout)

    def wait_signal(
        self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Waits for the next signal of `peer_rank`. `CommTimeoutError` breaks the communicator."""
        pad = self._open("wait_signal")
        memory = self._memory
        memory.require("wait_signal", Capability.SIGNAL)
        peer = self._engine.check.check_rank(OPERATIONS["wait_signal"], "peer_rank", peer_rank)
        word = pad.data_ptr() + peer * _LINE * 8

        def job(limit: float) -> None:
            wait_for(memory, word, Compare.GE, self._waited[peer] + 1, peer, limit)
            self._waited[peer] += 1

        return self._issue("wait_signal", job, peer, async_op, hints, timeout)

    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Completes when all ranks have called it; what they put before is there then.

        `MismatchError` on all ranks if some are in another operation on symmetric memory.
        """
        self._open("symm_barrier")

        def job(limit: float) -> None:
            self._memory.meet(limit, "symm_barrier")

        return self._issue("symm_barrier", job, -1, async_op, hints, timeout)

    def _issue(
        self,
        op: str,
        job: Callable[[float], None],
        peer: int,
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
    ) -> Work:
        return issue(self._engine, op, job, peer=peer, async_op=async_op, hints=hints, timeout=timeout)

    # --- atomics ----------------------------------------------------------------------------------------

    def fetch_add(self, rank: int, offset_nelems: int, value: int, timeout: Timeout = None) -> int:
        """Adds `value` to an element of `rank`'s window, atomically; returns what it was. Wraps around.

        The window has to be of int64 or uint64, as for `compare_swap`.
        """
        address, signed = self._word("fetch_add", offset_nelems)
        return self._atomic("fetch_add", rank, (address, value % _BIAS), signed, timeout)

    def compare_swap(
        self, rank: int, offset_nelems: int, expected: int, value: int, timeout: Timeout = None
    ) -> int:
        """Sets an element of `rank`'s window to `value` if it is `expected`; returns what it was."""
        address, signed = self._word("compare_swap", offset_nelems)
        words = (address, expected % _BIAS, value % _BIAS)
        return self._atomic("compare_swap", rank, words, signed, timeout)

    def _word(self, op: str, offset: Any) -> tuple[int, bool]:
        tensor = self._registered(op)
        self._memory.require(op, Capability.ATOMICS)
        if tensor.dtype not in (torch.int64, torch.uint64):
            self._memory.invalid(op, f"the window is of {tensor.dtype}", "atomics need int64 or uint64")
        start = self._offset(op, offset)
        if start >= tensor.numel():
            self._memory.invalid(op, f"element {start} of a window of {tensor.numel()}", "count from 0")
        return tensor.data_ptr() + 8 * start, tensor.dtype == torch.int64

    def _atomic(self, op: str, rank: int, words: tuple[int, ...], signed: bool, timeout: Timeout) -> int:
        peer = self._engine.check.check_rank(OPERATIONS[op], "rank", rank)
        results = []

        def job(limit: float) -> None:
            fault, before = getattr(self._memory.domain, op)(*words, peer, 0)
            self._memory.check(fault, limit)
            results.append(before)

        issue(self._engine, op, job, peer=peer, timeout=timeout)
        before = int(results[0])
        return before - _BIAS if signed and before >= _BIAS // 2 else before

    # --- state ------------------------------------------------------------------------------------------

    def _open(self, op: str) -> torch.Tensor:
        self._engine.check_open(op)
        if self._pad is None:
            raise self._not_ready(op, "the window was freed", "make a new one")
        return self._pad

    def _registered(self, op: str) -> torch.Tensor:
        self._open(op)
        if self._tensor is None:
            raise self._not_ready(op, "the window has no tensor", "call tensor_register on all ranks")
        return self._tensor

    def _not_ready(self, op: str, message: str, hint: str) -> NotReadyError:
        engine = self._engine
        return NotReadyError(message, op=op, comm=engine.name, rank=engine.rank, hint=hint)


def wait_for(
    memory: SymmetricMemory, word: int, compare: Compare, value: int, source: int, limit: float
) -> None:
    """Waits until the own word at that address compares so; errors are about `source`."""
    fault = memory.domain.wait_signal(word, compare, value, source, limit, 0)
    try:
        memory.check(fault, limit)
    except CommTimeoutError as error:
        if error.culprits == (source,):
            raise error.again(f"rank {source} did not signal within {limit:g} s") from None
        raise


def new_window(comm: Communicator, tensor: Any, hints: Hints, timeout: Timeout) -> Window:
    """See `Communicator.new_window`."""
    engine = comm._engine
    engine.check_open("new_window")
    with engine.located("new_window"):
        engine.per_op("new_window", hints, timeout)
        if engine.backend.symmetric_table() is None:
            engine.refuse("new_window", f"backend '{engine.backend.name}' has no one-sided access")
        if tensor is not None and engine.symmetric is None:
            engine.check.fail(
                OPERATIONS["new_window"],
                "tensor is not in symmetric memory, which the communicator does not have yet",
                "make it with unicomm.symm.init(comm) and unicomm.symm.empty(..., comm=comm) on all ranks",
            )
        if tensor is not None and engine.symmetric is not None:
            engine.symmetric.check_symmetric("new_window", "tensor", tensor)
    window = Window(initialize(comm, timeout=timeout), timeout)
    if tensor is not None:
        try:
            window.tensor_register(tensor, timeout)
        except MismatchError:
            window.free(timeout)  # on all ranks
            raise
    return window
