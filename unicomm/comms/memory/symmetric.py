"""Symmetric memory of a communicator: every rank has the same allocations at the same offsets.

It uses a SHMEM library through csrc/symm/table.hpp. initialize.py connects it, explicitly and on all ranks;
an allocation never does. Allocating and freeing are collectives: all ranks call them in the same order with
the same sizes, and get an error otherwise.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from unicomm import _core
from unicomm._core import FaultCode
from unicomm.comms.backend import HasSymmetricMemory
from unicomm.comms.errors import (
    CommError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
)
from unicomm.comms.execution.one_sided import issue
from unicomm.comms.failures.faults import told
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.dtypes import OTHER, code_of
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.comms.operations.table import BY_CODE, OPERATIONS

from .heap_tensors import HeapTensors

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.options import Timeout


class OnTensor(Protocol):
    """A window, as far as the memory below it has to know it."""

    def get_tensor(self) -> torch.Tensor | None: ...

    def lose_tensor(self) -> None:
        """Forgets the tensor, which was freed: its memory may belong to another one soon."""


class SymmetricMemory:
    """One rank's end of a communicator's symmetric heap.

    Attributes:
        windows: those that were made here and still exist.
        counts_on_device: the number of signals waited for is counted on the device, where graphs are
        replayed.
    """

    counts_on_device = False

    def __init__(
        self,
        engine: Engine,
        capabilities: Capability,
        library: str,
        domain: Any,
        whole: SymmetricMemory | None = None,
    ) -> None:
        """`whole`: the memory that a team shares; None for a communicator with its own."""
        self.engine = engine
        self.rank, self.size = engine.rank, engine.group.size
        self.capabilities = capabilities
        self.library = library
        self.domain = domain
        self._whole = whole
        self.fast: Any = NoFastExchange()
        self.windows: weakref.WeakSet[OnTensor] = weakref.WeakSet()
        self._tensors = HeapTensors()

    def require(self, op: str, needed: Capability) -> None:
        """Raises `UnsupportedError` if the library lacks a capability."""
        if missing := needed & ~self.capabilities:
            names = ", ".join(c.name or "" for c in Capability if c in missing).lower()
            self.engine.refuse(op, f"symmetric memory of '{self.library}' lacks: {names}")

    def check(self, fault: Any, limit: float) -> None:
        """Raises the error of a fault that the native core returned."""
        if fault is not None:
            if fault[0] == FaultCode.MISMATCH and fault[2]:
                raise disagreement(*fault[1:3])
            symmetric_backend(self.engine).raise_fault(fault, limit)

    # --- allocations ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout: Timeout = None, align: int = 64) -> torch.Tensor:
        """Allocates bytes that all ranks have at the same offset. Collective."""
        self.require("symm_allocate", Capability.HEAP)
        self.engine.refuse_capture("symm_allocate")
        self._refuse_team("symm_allocate")
        addresses = []

        def job(limit: float) -> None:
            self.settle(limit)
            fault, address = self.domain.allocate(nbytes, align, limit)
            if fault is not None and fault[0] == FaultCode.INTERNAL:
                raise InvalidArgumentError(  # on all ranks alike, which stay in step
                    fault[3], hint="free tensors, or give unicomm.symm.init more heap_bytes"
                )
            self.check(fault, limit)
            addresses.append(address)

        issue(self.engine, "symm_allocate", job, timeout=timeout)
        tensor = self._bytes(addresses[0], nbytes)
        self._tensors.allocated(addresses[0], tensor)
        return tensor

    def free(self, tensor: Array, timeout: Timeout = None) -> None:
        """Frees an allocation. Collective. The tensor and its views must not be used any more.

        Before any rank can allocate its memory again, windows on it lose their tensor on all ranks, and
        tensors on it, other ranks' views among them, refuse to be written to.
        """
        self.engine.refuse_capture("symm_free")
        self._refuse_team("symm_free")
        address = self.check_tensor("symm_free", "tensor", tensor).data_ptr()
        if not self.domain.begins(address):
            self.engine.invalid(
                "symm_free",
                "the tensor does not begin an allocation of this communicator's symmetric memory",
                "pass what unicomm.symm.empty returned, once",
            )

        def job(limit: float) -> None:
            self.settle(limit)
            self.check(self.domain.free(address, limit), limit)
            for window in list(self.windows):
                if (own := window.get_tensor()) is not None and not self.holds(own):
                    window.lose_tensor()
            self._tensors.freed(address)

        issue(self.engine, "symm_free", job, timeout=timeout)

    def _refuse_team(self, op: str) -> None:
        if self._whole is not None:
            whole = self._whole.engine.name
            self.engine.refuse(
                op,
                f"a team has neither memory nor windows of its own: it uses those of communicator '{whole}'",
                f"allocate, free and make windows with '{whole}', on all its ranks",
            )

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(_core.symm_bytes(self.domain, address, nbytes))

    # --- tensors ----------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor lies in one allocation, which has not been freed."""
        try:
            return not tensor.numel() or bool(self.domain.holds(tensor.data_ptr(), span_of(tensor)))
        except RuntimeError:  # it was freed, see heap_tensors.py
            return False

    def check_tensor(
        self,
        op: str,
        name: str,
        value: Any,
        dtype: torch.dtype | None = None,
        writes: bool = True,
        strided: bool = False,
    ) -> torch.Tensor:
        """Returns the tensor, made from an array if needed.

        Raises `InvalidArgumentError` if it is on another device, of another dtype than `dtype`, or not
        contiguous although it has to be.
        """
        tensor = self.engine.check.check_tensor(OPERATIONS[op], name, value, writes, strided)
        if dtype is not None and tensor.dtype != dtype:
            self.engine.invalid(op, f"{name} is of {tensor.dtype}, not {dtype}", f"pass tensor.to({dtype})")
        return tensor

    def check_symmetric(
        self, op: str, name: str, value: Any, dtype: torch.dtype | None = None, strided: bool = False
    ) -> torch.Tensor:
        """Like `check_tensor`, for a tensor that has to lie in this communicator's symmetric memory."""
        tensor = self.check_tensor(op, name, value, dtype, strided=strided)
        if not self.holds(tensor):
            self.engine.invalid(
                op,
                f"{name} is not in the symmetric memory of communicator '{self.engine.name}', or was freed",
                "make it with unicomm.symm.empty(..., comm=comm) on all ranks",
            )
        return tensor

    def remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns `rank`'s copy of a symmetric tensor as memory of this process."""
        own = tensor.data_ptr()
        fault, address = self.domain.ptr(own, tensor.nbytes, rank)
        self.check(fault, 0.0)
        view = self._bytes(address, tensor.nbytes)
        self._tensors.mapped(own, view)
        return view.view(tensor.dtype).view(tensor.shape)

    def transfer(self, put: bool, plan: Sequence[tuple[int, int, int, int]], limit: float) -> None:
        """Copies (own address, symmetric address, bytes, rank) each. Returns when all copies are done."""
        if plan:
            rows = torch.tensor(plan, dtype=torch.int64, device="cpu").numpy()
            self.check(self.domain.transfer(put, rows, 0), limit)

    # --- meetings ---------------------------------------------------------------------------------------

    def open(self, said: torch.Tensor | None = None) -> None:
        """Allocates what the ranks tell each other at barriers. Collective, called at creation."""
        said = self.allocate(self.domain.said_bytes(self.size)) if said is None else said
        self.domain.open(self.rank, self.size, said.data_ptr())
        if isinstance(self.engine.fast, _core.FastCalls):
            self.fast = _core.SymmFast(self.engine.fast, self.domain)

    def meet(self, limit: float, op: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """A barrier at which all ranks must be in `op` with the same tensors, else `MismatchError` on all."""
        head = heading(op, tensors[0].dtype if tensors else None, limit)
        self.check(self.domain.meet(head, list(tensors)), limit)

    # --- overridden for devices in device_memory.py
    # ----------------------------------------------------------

    def reduces(self, dtype: torch.dtype, red: int) -> bool:
        """Whether composed operations support this element type and reduction."""
        return bool(_core.fold_defined(code_of(dtype), red))

    def atomic(self, op: str, words: tuple[int, ...], peer: int, limit: float) -> tuple[Any, int]:
        """Runs an atomic operation; returns (fault or None, old value)."""
        fault, before = getattr(self.domain, op)(*words, peer, 0)
        return fault, before

    def settle(self, limit: float) -> None:
        """Waits for the work of the current stream, and raises its error. Does nothing on the host."""

    def synchronize(self, timeout: Timeout = None) -> None:
        """See `unicomm.symm.synchronize`."""
        self.engine.check_open("symm_barrier")

    def grace(self) -> float:
        """Seconds beyond its timeout that the watchdog gives an operation, whose kernels time out first."""
        return 0.0

    def late_error(self) -> CommError | None:
        """An error that ends the communicator, or None. Asked by the watchdog."""
        return None

    # --- life -------------------------------------------------------------------------------------------

    def abort(self, error: CommError | None = None) -> None:
        """Ends all waits. The other ranks are told of `error` if it names who is to blame."""
        if Capability.ABORT in self.capabilities:
            self.domain.abort(*told(error))

    def close(self) -> None:
        """Leaves the heap. Local. Tensors stay readable while they are alive."""
        self.domain.leave()


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def heading(
    op: str,
    dtype: torch.dtype | None,
    limit: float,
    red: int = 0,
    root: int = -1,
    relaxed: bool = False,
) -> tuple[int, int, int, int, bool, int, float]:
    """The values that the ranks compare at a barrier, as the native core takes them."""
    code = 0 if dtype is None else code_of(dtype)
    more = zlib.crc32(str(dtype).encode()) if code == OTHER else 0
    return OPERATIONS[op].code, code, red, root, relaxed, more, limit


class NoFastExchange:
    """The absence of a fast path: refuses every call. See csrc/symm/fast.cpp."""

    def _never(self, *_: object) -> Any:
        return False

    broadcast = all_to_all = all_to_all_v = dispatch = combine = _never
    one_shot = two_shot = reduce_scatter = move = signal = wait_signal = atomic = _never


def disagreement(culprits: Sequence[int], claims: Sequence[tuple[int, ...]]) -> MismatchError:
    """Makes the error of ranks that disagree. `claims`: (rank, operation, -, reduction, root, -, -)."""
    said: dict[str, list[int]] = {}
    for rank, op, _, red, root, _, _ in claims:
        row = BY_CODE.get(op)
        what = row.name if row else "something else"
        if red:
            what += f" {RedOpType(red).name.lower()}" if red in set(RedOpType) else " ?"
        said.setdefault(what + (f" of root {root}" if root >= 0 else ""), []).append(rank)
    calls = "; ".join(f"{', '.join(f'rank {r}' for r in ranks)}: {what}" for what, ranks in said.items())
    return MismatchError(
        f"the ranks called different operations, or with tensors at other places or of other sizes ({calls})",
        culprits=culprits,
        hint="pass the same allocations, shapes and options on all ranks",
    )


def symmetric_backend(engine: Engine) -> HasSymmetricMemory:
    assert isinstance(engine.backend, HasSymmetricMemory)
    return engine.backend


def attached(engine: Engine) -> SymmetricMemory | None:
    """The communicator's symmetric memory, or None before it has been initialised."""
    return cast("SymmetricMemory | None", engine.symmetric)


def memory_of(engine: Engine, op: str) -> SymmetricMemory:
    """The communicator's symmetric memory. Raises `NotReadyError` before it has been initialised."""
    engine.check_open(op)
    memory = attached(engine)
    if memory is None:
        hint = "call unicomm.symm.init(comm) on all ranks first"
        raise engine.error(NotReadyError, op, "the communicator has no symmetric memory yet", hint)
    return memory
