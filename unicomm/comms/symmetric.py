"""Symmetric memory of a communicator: every rank has the same allocations at the same offsets.

Over csrc/symm/table.hpp. `initialize` connects it, explicitly and on all ranks; an allocation never does.
Allocating and freeing are collectives that say so: all ranks call them in the same order with the same sizes,
and hear of it if not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from unicomm import _core

from .errors import BackendError, InvalidArgumentError, MismatchError, NotReadyError
from .one_sided import issue
from .ops import OPERATIONS

if TYPE_CHECKING:
    from .communicator import Communicator
    from .engine import Engine, Timeout

_INTERNAL = 5  # FaultCode
_FIXED = 24  # words of what ranks say when they meet, besides one for each rank


class Capability(enum.IntFlag):
    """What a SHMEM library can do; csrc/symm/table.hpp has the functions behind each."""

    HEAP = 1
    POINTER = 2
    PUT_GET = 4
    SIGNAL = 8
    ATOMICS = 16
    TEAMS = 32
    ABORT = 64


class SignalOp(enum.IntEnum):
    """What a signal does to the receiver's word."""

    SET = 0
    ADD = 1


class Compare(enum.IntEnum):
    """How a waiting rank compares its word with the value it waits for."""

    EQ = 0
    NE = 1
    GT = 2
    GE = 3
    LT = 4
    LE = 5


class SymmetricMemory:
    """One rank's end of a communicator's symmetric heap."""

    def __init__(self, engine: Engine, table: Any, domain: Any) -> None:
        self.engine = engine
        self.rank, self.size = engine.rank, engine.group.size
        self.capabilities = Capability(table.capabilities)
        self.library = str(table.name)
        self.domain = domain
        self._blocks: dict[int, int] = {}  # address -> bytes
        self._meetings = 0
        self._words: torch.Tensor | None = None

    def require(self, op: str, needed: Capability) -> None:
        """Raises `UnsupportedError` where the library lacks a capability."""
        if missing := needed & ~self.capabilities:
            names = ", ".join(c.name or "" for c in Capability if c in missing).lower()
            self.engine.refuse(op, f"symmetric memory of '{self.library}' lacks: {names}")

    def check(self, fault: Any, limit: float) -> None:
        """Raises the error of a fault that the native core returned."""
        if fault is not None:
            self.engine.backend.raise_fault(fault, limit)

    def invalid(self, op: str, message: str, hint: str) -> NoReturn:
        self.engine.check.fail(OPERATIONS[op], message, hint)

    # --- allocations ------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout: Timeout = None, align: int = 64) -> torch.Tensor:
        """Collective: bytes that all ranks have at the same offset."""
        self.require("symm_allocate", Capability.HEAP)
        addresses = []

        def job(limit: float) -> None:
            self._meetings += 1
            fault, address = self.domain.allocate(nbytes, align, limit)
            if fault is not None and fault[0] == _INTERNAL:
                raise InvalidArgumentError(  # the same on all ranks, which stay in step
                    fault[3], hint="free tensors, or give unicomm.symm.init more heap_bytes"
                )
            self.check(fault, limit)
            addresses.append(address)

        issue(self.engine, "symm_allocate", job, timeout=timeout)
        address = addresses[0]
        self._blocks[address] = nbytes
        return self._bytes(address, nbytes)

    def free(self, tensor: torch.Tensor, timeout: Timeout = None) -> None:
        """Collective: gives an allocation back. The tensor, and views of it, must not be used any more."""
        address = tensor.data_ptr()
        if address not in self._blocks:
            self.invalid(
                "symm_free",
                "the tensor does not begin an allocation of this communicator's symmetric memory",
                "pass what unicomm.symm.empty returned, once",
            )

        def job(limit: float) -> None:
            self._meetings += 1
            self.check(self.domain.free(address, limit), limit)

        issue(self.engine, "symm_free", job, timeout=timeout)
        del self._blocks[address]

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(_core.symm_bytes(self.domain, address, nbytes))

    # --- tensors ----------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of the tensor lies in one allocation."""
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        return any(at <= begin and end <= at + nbytes for at, nbytes in self._blocks.items())

    def check_tensor(self, op: str, name: str, tensor: Any, dtype: torch.dtype | None = None) -> None:
        """Raises `InvalidArgumentError` unless it is a contiguous tensor here, of that dtype."""
        self.engine.check.check_tensor(OPERATIONS[op], name, tensor)
        if dtype is not None and tensor.dtype != dtype:
            self.invalid(op, f"{name} is of {tensor.dtype}, not {dtype}", f"pass tensor.to({dtype})")

    def check_symmetric(self, op: str, name: str, tensor: Any, dtype: torch.dtype | None = None) -> None:
        """The same, and it has to lie in this communicator's symmetric memory."""
        self.check_tensor(op, name, tensor, dtype)
        if not self.holds(tensor):
            self.invalid(
                op,
                f"{name} is not in the symmetric memory of communicator '{self.engine.name}', or was freed",
                "make it with unicomm.symm.empty(..., comm=comm) on all ranks",
            )

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

    def open(self) -> None:
        """Collective, at creation: room for what the ranks tell each other when they meet."""
        width = _FIXED + self.size
        self._words = self.allocate(2 * width * 8).view(torch.int64).view(2, width)

    def anchor(self) -> int:
        """This rank's address of a place that all have: offsets from it can be compared."""
        assert self._words is not None
        return int(self._words.data_ptr())

    def barrier(self, limit: float) -> None:
        """Without a look at what the others call: for the end of what began with `meet`."""
        self._meetings += 1
        self.check(self.domain.barrier(limit, 0), limit)

    def meet(self, limit: float, same: Sequence[int], own: int = 0, each: Sequence[int] = ()) -> torch.Tensor:
        """A barrier at which all ranks must have the same words, else `MismatchError` on all of them.

        Returns by rank [own, *each], where `each` has up to one word for a rank.
        """
        assert self._words is not None
        assert len(same) < _FIXED - 1
        # In turn: who is here a second time has seen all others here once, after they read. All that the
        # ranks do together counts, so that they stay in turn also when some do something else.
        mine = self._words[(self._meetings + 1) % 2]
        # With the number, what somebody said earlier is not taken for an answer.
        said = [self._meetings, *same, *[0] * (_FIXED - 2 - len(same)), own, *each]
        mine[: len(said)] = torch.tensor(said, dtype=torch.int64)
        self.barrier(limit)
        all_said = torch.empty(self.size, mine.numel(), dtype=torch.int64)
        row = mine.nbytes
        self.transfer(
            False, [(all_said.data_ptr() + p * row, mine.data_ptr(), row, p) for p in range(self.size)], limit
        )
        heads = [tuple(words) for words in all_said[:, : _FIXED - 1].tolist()]
        if len(set(heads)) > 1:
            most = max(heads, key=heads.count)
            tie = 2 * heads.count(most) <= len(heads)
            raise MismatchError(
                "the ranks called different operations, or with tensors at other places or of other sizes",
                culprits=[r for r, head in enumerate(heads) if tie or head != most],
                hint="pass the same allocations, shapes and options on all ranks",
            )
        return all_said[:, _FIXED - 1 :]

    # --- life -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        if Capability.ABORT in self.capabilities:
            self.domain.abort()

    def close(self) -> None:
        """Local. Tensors stay readable for as long as somebody holds them."""
        self.domain.leave()


def initialize(comm: Communicator, heap_bytes: int = 0, timeout: Timeout = None) -> SymmetricMemory:
    """Collective: gives `comm` symmetric memory. See `unicomm.symm.init`."""
    engine = comm._engine
    engine.check_open("symm_init")
    if engine.symmetric is not None:
        return engine.symmetric
    table = engine.backend.symmetric_table()
    if table is None:
        engine.refuse(
            "symm_init",
            f"backend '{engine.backend.name}' has no one-sided access",
            "use the backend 'shm', for ranks of one host",
        )
    if heap_bytes < 0:
        engine.check.fail(OPERATIONS["symm_init"], f"heap_bytes={heap_bytes}", "0 for as many as can be")
    note = torch.zeros(129, dtype=torch.uint8)  # first whether it failed, then the id
    trouble = ""
    if engine.rank == 0:
        fault, uid = table.unique_id(engine.group.size, heap_bytes)
        if fault is None:
            note[1:] = torch.frombuffer(bytearray(uid), dtype=torch.uint8)
        else:
            note[0], trouble = 1, fault[3]
    try:
        engine.collective("broadcast", (note,), False, None, timeout, root=0)
        if note[0]:
            raise BackendError(
                f"no symmetric heap: {trouble or 'rank 0 could not make it'}",
                op="symm_init",
                comm=engine.name,
                rank=engine.rank,
                culprits=(0,),
                hint="ask for fewer heap_bytes; is there memory left, and file descriptors?",
            )
    except BaseException:
        if engine.rank == 0 and not note[0]:
            table.discard_id(note[1:].numpy().tobytes())
        raise
    uid = note[1:].numpy().tobytes()
    made: list[SymmetricMemory] = []

    def job(limit: float) -> None:
        fault, domain = table.init(uid, engine.rank, engine.group.size, engine.name, limit)
        if fault is not None:
            engine.backend.raise_fault(fault, limit)
        made.append(SymmetricMemory(engine, table, domain))

    issue(engine, "symm_init", job, timeout=timeout)
    engine.symmetric = memory = made[0]
    memory.open()
    return memory


def memory_of(comm: Communicator, op: str) -> SymmetricMemory:
    """The communicator's symmetric memory; `NotReadyError` where it was not initialised."""
    engine = comm._engine
    engine.check_open(op)
    if engine.symmetric is None:
        raise NotReadyError(
            "the communicator has no symmetric memory yet",
            op=op,
            comm=engine.name,
            rank=engine.rank,
            hint="call unicomm.symm.init(comm) on all ranks first",
        )
    return engine.symmetric
