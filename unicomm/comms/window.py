"""Window: one-sided access to the other ranks' tensors, with torchcomms' names.

A window has a counter for each pair of ranks: `signal` adds one to the receiver's, `wait_signal` waits for
one more than it has waited for before. So signals are never lost, and nobody who signals waits. Here are the
names and what is checked; heap_window.py has it over symmetric memory, library_window.py over a library's own
windows.
"""

from __future__ import annotations

import abc
import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unicomm.comms.execution.one_sided import issue
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.table import OPERATIONS

from .backend import HasOneSided, HasSymmetricMemory
from .errors import MismatchError, NotReadyError
from .work import Work

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.options import Hints, Timeout

    from .communicator import Communicator


class WindowAccess(enum.IntEnum):
    """Whether a rank and those that access its window see the same memory at once."""

    UNIFIED = 0
    SEPARATE = 1


@dataclass(frozen=True)
class WindowAttr:
    """What `Window.get_attr` returns."""

    access_type: WindowAccess


class Window(abc.ABC):
    """Made by `Communicator.new_window`, on all ranks. Offsets and counts are in elements of its dtype.

    `put` and `signal` to one rank keep their order: who has seen the signal sees the data. Operations take
    `async_op`, `hints` and `timeout` as the communicator's do, and return a `Work`. Wrong ranks, bounds and
    dtypes raise `InvalidArgumentError` before anything is sent; what the library behind it lacks raises
    `UnsupportedError`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tensor: torch.Tensor | None = None
        self._freed = False

    # --- what it is for ---------------------------------------------------------------------------------

    def tensor_register(self, tensor: Array, timeout: Timeout = None) -> None:
        """Opens `tensor` to the other ranks. Collective, with the same allocation on all ranks.

        It has to be from `unicomm.symm.empty(..., comm=comm)`, or a contiguous view of such a tensor; on
        `nccl` from `comm.mem_allocator`. Raises `MismatchError` on all ranks if they pass different ones.
        """
        self._open("new_window")
        self._engine.refuse_capture("new_window")
        if self._tensor is not None:
            self._invalid("new_window", "a tensor is registered already", "deregister it first")
        own = self._check_window(tensor)
        self._attach(own, timeout)
        self._tensor = own

    def tensor_deregister(self, timeout: Timeout = None) -> None:
        """Ends the others' access. Collective: when it returns nobody accesses the tensor any more."""
        self._registered("new_window")
        self._engine.refuse_capture("new_window")
        self.barrier(False, timeout=timeout)
        self._detach()
        self._tensor = None

    @abc.abstractmethod
    def free(self, timeout: Timeout = None) -> None:
        """Gives the window's own memory back. Collective. Does not free the tensor."""

    def get_tensor(self) -> torch.Tensor | None:
        """This rank's registered tensor."""
        return self._tensor

    def get_size(self) -> int:
        """Bytes of the registered tensor; 0 without one."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """How `peer_rank`'s memory is seen: UNIFIED where this rank can address it."""
        self._peer("new_window", "peer_rank", peer_rank)
        return WindowAttr(WindowAccess.SEPARATE)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """`rank`'s tensor, as memory of this process. It stays mapped for as long as the result lives."""
        self._lacks("new_window", "cannot address other ranks' memory")

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
        """Writes `tensor` into `dst_rank`'s window from that element on.

        Done there when it has completed; on a device when a signal that came after it has been waited for.
        """
        source, start = self._place("put", tensor, target_offset_nelems)
        peer = self._peer("put", "dst_rank", dst_rank)
        job = self._putting(source, start, peer)
        return self._issue("put", job, peer, async_op, hints, timeout, inputs=[source])

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
        target, start = self._place("get", tensor, source_offset_nelems)
        peer = self._peer("get", "src_rank", src_rank)
        job = self._getting(target, start, peer)
        return self._issue("get", job, peer, async_op, hints, timeout, outputs=[target])

    # --- signals ----------------------------------------------------------------------------------------

    def signal(self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Signals `peer_rank`, after what was put there before. Does not wait for it."""
        self._open("signal")
        peer = self._peer("signal", "peer_rank", peer_rank)
        return self._issue("signal", self._signalling(peer), peer, async_op, hints, timeout)

    def wait_signal(
        self, peer_rank: int, async_op: bool, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Waits for the next signal of `peer_rank`. `CommTimeoutError` breaks the communicator."""
        self._open("wait_signal")
        peer = self._peer("wait_signal", "peer_rank", peer_rank)
        return self._issue("wait_signal", self._waiting(peer), peer, async_op, hints, timeout)

    @abc.abstractmethod
    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Completes when all ranks have called it; what they put before is there then.

        `MismatchError` on all ranks if some are in another operation on symmetric memory.
        """

    # --- atomics ----------------------------------------------------------------------------------------

    def fetch_add(self, rank: int, offset_nelems: int, value: int, timeout: Timeout = None) -> int:
        """Adds `value` to an element of `rank`'s window, atomically; returns what it was. Wraps around.

        The window has to be of int64 or uint64, as for `compare_swap`.
        """
        self._lacks("fetch_add", "has no atomic operations")

    def compare_swap(
        self, rank: int, offset_nelems: int, expected: int, value: int, timeout: Timeout = None
    ) -> int:
        """Sets an element of `rank`'s window to `value` if it is `expected`; returns what it was."""
        self._lacks("compare_swap", "has no atomic operations")

    # --- what it is made of: jobs that run in the order of the operations, with their timeout -------------

    @abc.abstractmethod
    def _check_window(self, value: Any) -> torch.Tensor:
        """The tensor, or the one on an array's memory; `InvalidArgumentError` if it cannot be opened."""

    @abc.abstractmethod
    def _attach(self, tensor: torch.Tensor, timeout: Timeout) -> None:
        """Collective: opens it."""

    def _detach(self) -> None:  # noqa: B027
        """Closes it, when nobody accesses it any more."""

    @abc.abstractmethod
    def _putting(self, tensor: torch.Tensor, start: int, peer: int) -> Callable[[float], None]: ...

    def _getting(self, tensor: torch.Tensor, start: int, peer: int) -> Callable[[float], None]:
        self._lacks("get", "has no get")

    @abc.abstractmethod
    def _signalling(self, peer: int) -> Callable[[float], None]: ...

    @abc.abstractmethod
    def _waiting(self, peer: int) -> Callable[[float], None]: ...

    # --- checks -----------------------------------------------------------------------------------------

    def _place(self, op: str, value: Any, offset: Any) -> tuple[torch.Tensor, int]:
        """The tensor, and its first element in the window; all of it fits there."""
        own = self._registered(op)
        tensor = self._engine.check.check_tensor(OPERATIONS[op], "tensor", value, op == "get")
        if tensor.dtype != own.dtype:
            self._invalid(op, f"tensor is of {tensor.dtype}, not {own.dtype}", f"pass tensor.to({own.dtype})")
        start = self._offset(op, offset)
        if start + tensor.numel() > own.numel():
            self._invalid(
                op,
                f"elements {start} to {start + tensor.numel()} of a window of {own.numel()}",
                "register a larger tensor, or move fewer elements",
            )
        return tensor, start

    def _offset(self, op: str, offset: Any) -> int:
        try:
            start = operator.index(offset)
        except TypeError:
            self._invalid(op, f"offset {offset!r} is no whole number", "count in elements, from 0")
        if start < 0:
            self._invalid(op, f"offset {start} is negative", "count in elements, from 0")
        return start

    def _peer(self, op: str, name: str, rank: Any) -> int:
        return self._engine.check.check_rank(OPERATIONS[op], name, rank)

    def _invalid(self, op: str, message: str, hint: str) -> NoReturn:
        self._engine.check.fail(OPERATIONS[op], message, hint)

    def _lacks(self, op: str, what: str) -> NoReturn:
        self._engine.refuse(op, f"backend '{self._engine.backend.name}' {what}")

    def _open(self, op: str) -> None:
        self._engine.check_open(op)
        if self._freed:
            raise self._not_ready(op, "the window was freed", "make a new one")

    def _registered(self, op: str) -> torch.Tensor:
        self._open(op)
        if self._tensor is None:
            raise self._not_ready(op, "the window has no tensor", "call tensor_register on all ranks")
        return self._tensor

    def _not_ready(self, op: str, message: str, hint: str) -> NotReadyError:
        engine = self._engine
        return NotReadyError(message, op=op, comm=engine.name, rank=engine.rank, hint=hint)

    def _issue(
        self,
        op: str,
        job: Callable[[float], None],
        peer: int,
        async_op: bool,
        hints: Hints,
        timeout: Timeout,
        **tensors: Any,
    ) -> Work:
        return issue(
            self._engine, op, job, peer=peer, async_op=async_op, hints=hints, timeout=timeout, **tensors
        )


def _in_heap(engine: Engine, tensor: Any) -> bool:
    """Whether it is a symmetric tensor of the communicator's, whatever windows its library has besides."""
    return (
        engine.symmetric is not None and isinstance(tensor, torch.Tensor) and engine.symmetric.holds(tensor)
    )


def new_window(comm: Communicator, tensor: Any, hints: Hints, timeout: Timeout) -> Window:
    """See `Communicator.new_window`."""
    engine = comm._engine
    engine.check_open("new_window")
    engine.refuse_capture("new_window")
    with engine.located("new_window"):
        engine.per_op("new_window", hints, timeout)
        window: Window
        if _in_heap(engine, tensor):
            from unicomm.comms.memory.heap_window import HeapWindow

            window = HeapWindow.of(comm, tensor, timeout)
        elif isinstance(engine.backend, HasOneSided):
            from unicomm.comms.memory.library_window import LibraryWindow

            window = LibraryWindow.of(engine, engine.backend.one_sided(), tensor)
        elif isinstance(engine.backend, HasSymmetricMemory):
            engine.backend.symmetric_table()  # raises where these ranks cannot have it
            from unicomm.comms.memory.heap_window import HeapWindow

            window = HeapWindow.of(comm, tensor, timeout)
        else:
            engine.refuse("new_window", f"backend '{engine.backend.name}' has no one-sided access")
    if tensor is not None:
        try:
            window.tensor_register(tensor, timeout)
        except MismatchError:
            window.free(timeout)  # on all ranks
            raise
    return window
