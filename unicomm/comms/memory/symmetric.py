"""Symmetric memory of a communicator: every rank has the same allocations at the same offsets.

Over csrc/symm/table.hpp. `initialize` connects it, explicitly and on all ranks; an allocation never does.
Allocating and freeing are collectives that say so: all ranks call them in the same order with the same sizes,
and hear of it if not.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from unicomm import _core
from unicomm.comms.backend import HasSymmetricMemory
from unicomm.comms.errors import (
    CommError,
    InvalidArgumentError,
    MismatchError,
    NotReadyError,
)
from unicomm.comms.execution.one_sided import issue
from unicomm.comms.operations.arrays import Array
from unicomm.comms.operations.dtypes import OTHER, code_of
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.comms.operations.table import BY_CODE, OPERATIONS

if TYPE_CHECKING:
    from unicomm.comms.execution.engine import Engine
    from unicomm.comms.options import Timeout

_MISMATCH, _INTERNAL = 3, 5  # FaultCode


class SymmetricMemory:
    """One rank's end of a communicator's symmetric heap.

    Attributes:
        counts_on_device: how many signals were waited for is counted there, where graphs are replayed.
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
        """`whole`: whose memory a team uses."""
        self.engine = engine
        self.rank, self.size = engine.rank, engine.group.size
        self.capabilities = capabilities
        self.library = library
        self.domain = domain
        self._whole = whole
        self.fast: Any = NoFastExchange()

    def require(self, op: str, needed: Capability) -> None:
        """Raises `UnsupportedError` where the library lacks a capability."""
        if missing := needed & ~self.capabilities:
            names = ", ".join(c.name or "" for c in Capability if c in missing).lower()
            self.engine.refuse(op, f"symmetric memory of '{self.library}' lacks: {names}")

    def check(self, fault: Any, limit: float) -> None:
        """Raises the error of a fault that the native core returned."""
        if fault is not None:
            if fault[0] == _MISMATCH and fault[2]:
                raise disagreement(*fault[1:3])
            symmetric_backend(self.engine).raise_fault(fault, limit)

    def invalid(self, op: str, message: str, hint: str) -> NoReturn:
        self.engine.check.fail(OPERATIONS[op], message, hint)

    # --- allocations ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout: Timeout = None, align: int = 64) -> torch.Tensor:
        """Collective: bytes that all ranks have at the same offset."""
        self.require("symm_allocate", Capability.HEAP)
        self.engine.refuse_capture("symm_allocate")
        self._refuse_team("symm_allocate")
        addresses = []

        def job(limit: float) -> None:
            self.settle(limit)
            fault, address = self.domain.allocate(nbytes, align, limit)
            if fault is not None and fault[0] == _INTERNAL:
                raise InvalidArgumentError(  # the same on all ranks, which stay in step
                    fault[3], hint="free tensors, or give unicomm.symm.init more heap_bytes"
                )
            self.check(fault, limit)
            addresses.append(address)

        issue(self.engine, "symm_allocate", job, timeout=timeout)
        return self._bytes(addresses[0], nbytes)

    def free(self, tensor: Array, timeout: Timeout = None) -> None:
        """Collective: gives an allocation back. The tensor, and views of it, must not be used any more."""
        self.engine.refuse_capture("symm_free")
        self._refuse_team("symm_free")
        address = self.check_tensor("symm_free", "tensor", tensor).data_ptr()
        if not self.domain.begins(address):
            self.invalid(
                "symm_free",
                "the tensor does not begin an allocation of this communicator's symmetric memory",
                "pass what unicomm.symm.empty returned, once",
            )

        def job(limit: float) -> None:
            self.settle(limit)
            self.check(self.domain.free(address, limit), limit)

        issue(self.engine, "symm_free", job, timeout=timeout)

    def _refuse_team(self, op: str) -> None:
        if self._whole is not None:
            whole = self._whole.engine.name
            self.engine.refuse(
                op,
                f"a team has no memory of its own, nor windows: it is that of communicator '{whole}'",
                f"allocate, free and make windows with '{whole}', on all its ranks",
            )

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(_core.symm_bytes(self.domain, address, nbytes))

    # --- tensors ----------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor lies in one allocation."""
        return not tensor.numel() or bool(self.domain.holds(tensor.data_ptr(), span_of(tensor)))

    def check_tensor(
        self,
        op: str,
        name: str,
        value: Any,
        dtype: torch.dtype | None = None,
        writes: bool = True,
        strided: bool = False,
    ) -> torch.Tensor:
        """The tensor, or the one on an array's memory.

        Raises `InvalidArgumentError` unless it is contiguous or may be `strided`, on the right device, and of
        that dtype.
        """
        tensor = self.engine.check.check_tensor(OPERATIONS[op], name, value, writes, strided)
        if dtype is not None and tensor.dtype != dtype:
            self.invalid(op, f"{name} is of {tensor.dtype}, not {dtype}", f"pass tensor.to({dtype})")
        return tensor

    def check_symmetric(
        self, op: str, name: str, value: Any, dtype: torch.dtype | None = None, strided: bool = False
    ) -> torch.Tensor:
        """The same, and it has to lie in this communicator's symmetric memory."""
        tensor = self.check_tensor(op, name, value, dtype, strided=strided)
        if not self.holds(tensor):
            self.invalid(
                op,
                f"{name} is not in the symmetric memory of communicator '{self.engine.name}', or was freed",
                "make it with unicomm.symm.empty(..., comm=comm) on all ranks",
            )
        return tensor

    def remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """`rank`'s copy of a symmetric tensor, as memory of this process."""
        fault, address = self.domain.ptr(tensor.data_ptr(), tensor.nbytes, rank)
        self.check(fault, 0.0)
        return self._bytes(address, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def transfer(self, put: bool, plan: Sequence[tuple[int, int, int, int]], limit: float) -> None:
        """Many copies: (own address, symmetric address, bytes, rank) each; all done when it returns."""
        if plan:
            rows = torch.tensor(plan, dtype=torch.int64).numpy()
            self.check(self.domain.transfer(put, rows, 0), limit)

    # --- meetings ---------------------------------------------------------------------------------------

    def open(self, said: torch.Tensor | None = None) -> None:
        """Collective, at creation: room for what the ranks tell each other when they meet."""
        said = self.allocate(self.domain.said_bytes(self.size)) if said is None else said
        self.domain.open(self.rank, self.size, said.data_ptr())
        if isinstance(self.engine.fast, _core.FastCalls):
            self.fast = _core.SymmFast(self.engine.fast, self.domain)

    def meet(self, limit: float, op: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """A barrier at which all ranks must be in `op` with the same tensors, else `MismatchError` on all."""
        head = heading(op, tensors[0].dtype if tensors else None, limit)
        self.check(self.domain.meet(head, list(tensors)), limit)

    # --- what devices do otherwise: device_memory.py --------------------------------------------------------

    def reduces(self, dtype: torch.dtype, red: int) -> bool:
        """Whether the composites can."""
        return bool(_core.fold_defined(code_of(dtype), red))

    def atomic(self, op: str, words: tuple[int, ...], peer: int, limit: float) -> tuple[Any, int]:
        """A fault, and what was there."""
        fault, before = getattr(self.domain, op)(*words, peer, 0)
        return fault, before

    def settle(self, limit: float) -> None:
        """Waits until what was put on the current stream is done, and raises what went wrong there."""

    def synchronize(self, timeout: Timeout = None) -> None:
        """See `unicomm.symm.synchronize`."""
        self.engine.check_open("symm_barrier")

    def grace(self) -> float:
        """Seconds by which the watchdog lets operations be late, which end their waits themselves."""
        return 0.0

    def late_error(self) -> CommError | None:
        """What ends the communicator; the watchdog asks."""
        return None

    # --- life -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        if Capability.ABORT in self.capabilities:
            self.domain.abort()

    def close(self) -> None:
        """Local. Tensors stay readable for as long as somebody holds them."""
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
    """What the ranks compare when they meet, as the native core takes it."""
    code = 0 if dtype is None else code_of(dtype)
    more = zlib.crc32(str(dtype).encode()) if code == OTHER else 0
    return OPERATIONS[op].code, code, red, root, relaxed, more, limit


class NoFastExchange:
    """Stands where there is no fast path: see csrc/symm/fast.cpp."""

    def _never(self, *_: object) -> Any:
        return False

    broadcast = all_to_all = all_to_all_v = dispatch = combine = _never
    one_shot = two_shot = reduce_scatter = move = signal = wait_signal = _never


def disagreement(culprits: Sequence[int], claims: Sequence[tuple[int, ...]]) -> MismatchError:
    """Of ranks that met: (rank, operation, -, reduction, root, -, -) of each."""
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
    """The communicator's symmetric memory; `NotReadyError` where it was not initialised."""
    engine.check_open(op)
    memory = attached(engine)
    if memory is None:
        raise NotReadyError(
            "the communicator has no symmetric memory yet",
            op=op,
            comm=engine.name,
            rank=engine.rank,
            hint="call unicomm.symm.init(comm) on all ranks first",
        )
    return memory
