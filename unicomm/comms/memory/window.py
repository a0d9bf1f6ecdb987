"""Window: one-sided access to the other ranks' tensors, with torchcomms' names.

A window has a counter for each pair of ranks: `signal` adds one to the receiver's counter, and `wait_signal`
waits until the counter exceeds the number of signals it has waited for before. So no signal is lost, and a
signal never blocks. This file has the interface and the checks; heap_window.py implements it over symmetric
memory, library_window.py over a library's own windows.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unicomm.comms.errors import NotReadyError
from unicomm.comms.execution.one_sided import issue
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.numbers import as_index
from unicomm.comms.operations.table import OPERATIONS
from unicomm.comms.work import Work

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.options import Hints, Timeout


class WindowAccess(enum.IntEnum):
    """Whether a rank and the ranks that access its window see the same memory at once."""

    UNIFIED = 0
    SEPARATE = 1


@dataclass(frozen=True)
class WindowAttr:
    """What `Window.get_attr` returns."""

    access_type: WindowAccess


class Window(abc.ABC):
    """A window, made by `Communicator.new_window` on all ranks. Offsets count elements of its dtype.

    `put` and `signal` to one rank keep their order: a rank that has seen the signal sees the data. Operations
    take `async_op`, `hints` and `timeout` as the communicator's do, and return a `Work`. Wrong ranks, bounds
    and dtypes raise `InvalidArgumentError` before anything is sent; what the library behind it lacks raises
    `UnsupportedError`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tensor: torch.Tensor | None = None
        self._freed = False
        self._lost = False  # the tensor was freed while it was registered

    # --- the tensor ---------------------------------------------------------------------------------

    def tensor_register(self, tensor: Array, timeout: Timeout = None) -> None:
        """Opens `tensor` to the other ranks. Collective, with the same allocation on all ranks.

        The tensor has to be from `unicomm.symm.empty(..., comm=comm)`, or a contiguous view of such a tensor;
        on `nccl` from `comm.mem_allocator`. Raises `MismatchError` on all ranks if they pass different ones.
        """
        self._open("new_window")
        self._engine.refuse_capture("new_window")
        if self._tensor is not None:
            self._engine.invalid("new_window", "a tensor is registered already", "deregister it first")
        own = self._check_window(tensor)
        self._attach(own, timeout)
        self._tensor, self._lost = own, False

    def tensor_deregister(self, timeout: Timeout = None) -> None:
        """Ends the other ranks' access. Collective: when it returns, no rank accesses the tensor any more."""
        self._registered("new_window")
        self._engine.refuse_capture("new_window")
        self.barrier(False, timeout=timeout)
        self._detach()
        self._tensor = None

    @abc.abstractmethod
    def free(self, timeout: Timeout = None) -> None:
        """Frees the window's own memory. Collective. Does not free the tensor."""

    def get_tensor(self) -> torch.Tensor | None:
        """This rank's registered tensor."""
        return self._tensor

    def get_size(self) -> int:
        """Bytes of the registered tensor; 0 without one."""
        return 0 if self._tensor is None else self._tensor.nbytes

    def get_attr(self, peer_rank: int) -> WindowAttr:
        """How this rank sees `peer_rank`'s memory: UNIFIED if it can address it."""
        self._peer("new_window", "peer_rank", peer_rank)
        return WindowAttr(WindowAccess.SEPARATE)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """Returns `rank`'s tensor as memory of this process, which stays mapped while the result lives.

        It cannot be written to after `unicomm.symm.free` has freed the window's tensor.
        """
        self._lacks("new_window", "cannot address other ranks' memory")

    # --- data -------------------------------------------------------------------------------------------

    def put(
        self,
        tensor: Array,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Writes `tensor` into `dst_rank`'s window, from element `target_offset_nelems` on.

        The data is there when the operation has completed; on a device, when `dst_rank` has waited for a
        signal that was issued after it.
        """
        if done := self._short_move("put", tensor, dst_rank, target_offset_nelems, async_op, hints, timeout):
            return done
        source, start = self._place("put", tensor, target_offset_nelems)
        peer = self._peer("put", "dst_rank", dst_rank)
        job = self._moving("put", source, start, peer)
        return self._issue("put", job, peer, async_op, hints, timeout, inputs=[source])

    def get(
        self,
        tensor: Array,
        src_rank: int,
        source_offset_nelems: int,
        async_op: bool = False,
        hints: Hints = None,
        timeout: Timeout = None,
    ) -> Work:
        """Fills `tensor` from `src_rank`'s window, from element `source_offset_nelems` on."""
        if done := self._short_move("get", tensor, src_rank, source_offset_nelems, async_op, hints, timeout):
            return done
        target, start = self._place("get", tensor, source_offset_nelems)
        peer = self._peer("get", "src_rank", src_rank)
        job = self._moving("get", target, start, peer)
        return self._issue("get", job, peer, async_op, hints, timeout, outputs=[target])

    # --- signals ----------------------------------------------------------------------------------------

    def signal(
        self, peer_rank: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Signals `peer_rank`, behind the data put there before. Does not wait for `peer_rank`."""
        self._open("signal")
        peer = self._peer("signal", "peer_rank", peer_rank)
        return self._issue("signal", self._signalling(peer), peer, async_op, hints, timeout)

    def wait_signal(
        self, peer_rank: int, async_op: bool = False, hints: Hints = None, timeout: Timeout = None
    ) -> Work:
        """Waits for the next signal of `peer_rank`. `CommTimeoutError` breaks the communicator."""
        self._open("wait_signal")
        peer = self._peer("wait_signal", "peer_rank", peer_rank)
        return self._issue("wait_signal", self._waiting(peer), peer, async_op, hints, timeout)

    @abc.abstractmethod
    def barrier(self, async_op: bool = False, hints: Hints = None, timeout: Timeout = None) -> Work:
        """Completes when all ranks have called it and the data that they put before is there.

        `MismatchError` on all ranks if some are in another operation on symmetric memory.
        """

    # --- atomics ----------------------------------------------------------------------------------------

    def fetch_add(self, rank: int, offset_nelems: int, value: int, timeout: Timeout = None) -> int:
        """Adds `value` to an element of `rank`'s window, atomically; returns its old value. Wraps around.

        The element is number `offset_nelems`. The window has to be of int64 or uint64, as for `compare_swap`.
        """
        self._lacks("fetch_add", "has no atomic operations")

    def compare_swap(
        self, rank: int, offset_nelems: int, expected: int, value: int, timeout: Timeout = None
    ) -> int:
        """Sets element `offset_nelems` of `rank`'s window to `value` if it is `expected`.

        Returns its old value.
        """
        self._lacks("compare_swap", "has no atomic operations")

    # --- for implementations: jobs that run in the order of the operations, with their timeout ------------

    @abc.abstractmethod
    def _check_window(self, value: Any) -> torch.Tensor:
        """Returns the tensor, made from an array if needed; `InvalidArgumentError` if it cannot be opened."""

    @abc.abstractmethod
    def _attach(self, tensor: torch.Tensor, timeout: Timeout) -> None:
        """Opens the tensor to the other ranks. Collective."""

    def _detach(self) -> None:  # noqa: B027
        """Closes the tensor, when no rank accesses it any more."""

    def _short_move(self, op: str, *arguments: Any) -> Work | None:
        """Runs a "put" or "get" by a fast path, with its own arguments; None if that does not take it."""
        return None

    @abc.abstractmethod
    def _moving(self, op: str, tensor: torch.Tensor, start: int, peer: int) -> Callable[[float], None]:
        """The job of a "put" or "get"."""

    @abc.abstractmethod
    def _signalling(self, peer: int) -> Callable[[float], None]: ...

    @abc.abstractmethod
    def _waiting(self, peer: int) -> Callable[[float], None]: ...

    # --- checks -----------------------------------------------------------------------------------------

    def _place(self, op: str, value: Any, offset: Any) -> tuple[torch.Tensor, int]:
        """Returns the checked tensor and the offset at which it fits into the window."""
        own = self._registered(op)
        tensor = self._engine.check.check_tensor(OPERATIONS[op], "tensor", value, op == "get")
        if tensor.dtype != own.dtype:
            self._engine.invalid(
                op, f"tensor is of {tensor.dtype}, not {own.dtype}", f"pass tensor.to({own.dtype})"
            )
        start = self._offset(op, offset)
        if start + tensor.numel() > own.numel():
            self._engine.invalid(
                op,
                f"elements {start} to {start + tensor.numel()} of a window of {own.numel()}",
                "register a larger tensor, or move fewer elements",
            )
        return tensor, start

    def _offset(self, op: str, offset: Any) -> int:
        try:
            start = as_index(offset)
        except TypeError:
            self._engine.invalid(op, f"offset {offset!r} is no whole number", "count in elements, from 0")
        if start < 0:
            self._engine.invalid(op, f"offset {start} is negative", "count in elements, from 0")
        return start

    def _peer(self, op: str, name: str, rank: Any) -> int:
        return self._engine.check.check_rank(OPERATIONS[op], name, rank)

    def _lacks(self, op: str, what: str) -> NoReturn:
        self._engine.refuse(op, f"backend '{self._engine.backend.name}' {what}")

    def _open(self, op: str) -> None:
        self._engine.check_open(op)
        if self._freed:
            raise self._engine.error(NotReadyError, op, "the window was freed", "make a new one")

    def _registered(self, op: str) -> torch.Tensor:
        self._open(op)
        if self._tensor is None:
            what = "the window's tensor was freed" if self._lost else "the window has no tensor"
            hint = "call tensor_register on all ranks"
            raise self._engine.error(NotReadyError, op, what, hint)
        return self._tensor

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
