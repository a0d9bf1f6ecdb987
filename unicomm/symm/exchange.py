"""What the operations above the table have in common.

All read: each rank waits until all are there, looks at what the others have for it, and copies it. So a rank
writes to its own tensors only, and one that gives up spoils nobody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from unicomm import _core
from unicomm.comms.communicator import Communicator
from unicomm.comms.dtypes import code_of
from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.one_sided import issue
from unicomm.comms.ops import OPERATIONS
from unicomm.comms.reduction import RedOpType
from unicomm.comms.symmetric import Capability, SymmetricMemory, memory_of
from unicomm.comms.window import hash_of

Timeout = timedelta | float | None


class Exchange:
    """One call of an operation: its checks, then its steps within `run`."""

    def __init__(self, op: str, comm: Communicator, timeout: Timeout, relaxed: bool = False) -> None:
        self.op = op
        self.memory: SymmetricMemory = memory_of(comm, op)
        self.rank, self.size = self.memory.rank, self.memory.size
        self._timeout, self._relaxed = timeout, relaxed
        self._anchor = self.memory.anchor()
        self.limit = 0.0
        self.memory.require(op, Capability.HEAP | Capability.PUT_GET)

    # --- before anything happens -------------------------------------------------------------------------

    def fail(self, message: str, hint: str) -> NoReturn:
        self.memory.invalid(self.op, message, hint)

    def symmetric(self, **tensors: Any) -> None:
        for name, tensor in tensors.items():
            self.memory.check_symmetric(self.op, name, tensor)

    def same_dtype(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype != b.dtype:
            self.fail(f"input is of {a.dtype}, out of {b.dtype}", "make them of one dtype")

    def apart(self, **tensors: torch.Tensor) -> None:
        """No two of them share memory."""
        for (a, one), (b, other) in itertools.combinations(tensors.items(), 2):
            begin, start = one.data_ptr(), other.data_ptr()
            if begin < start + other.nbytes and start < begin + one.nbytes:
                self.fail(f"{a} and {b} share memory, which other ranks read", "pass separate tensors")

    def reduction(self, op: str, dtype: torch.dtype) -> int:
        """The core's number of a reduction by name."""
        try:
            red = RedOpType[op.upper()]
        except (KeyError, AttributeError):
            self.fail(f"reduction {op!r} is unknown", 'it is "sum", "product", "min" or "max"')
        if red in (RedOpType.PREMUL_SUM, RedOpType.AVG) or not _core.fold_defined(code_of(dtype), int(red)):
            self.memory.engine.refuse(
                self.op, f"{op} of {dtype} is not defined", 'use "sum", or another dtype'
            )
        return int(red)

    # --- steps --------------------------------------------------------------------------------------------

    def run(
        self, steps: Callable[[], None], ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] = ()
    ) -> None:
        """Issues `steps` as one operation. All ranks leave together unless `relaxed`, also with an
        `InvalidArgumentError` that all of them raise."""

        def job(limit: float) -> None:
            self.limit = limit
            refused: InvalidArgumentError | None = None
            try:
                steps()
            except InvalidArgumentError as error:
                refused = error
            if refused is not None or not self._relaxed:
                self.memory.barrier(limit)
            if refused is not None:
                raise refused

        issue(self.memory.engine, self.op, job, inputs=ins, outputs=outs, timeout=self._timeout)

    def meet(
        self,
        tensors: Sequence[torch.Tensor],
        same: Sequence[int] = (),
        own: int = 0,
        each: Sequence[int] = (),
    ) -> torch.Tensor:
        """Waits for all ranks, which must pass the same tensors and `same`; see `SymmetricMemory.meet`."""
        said = [OPERATIONS[self.op].code, int(self._relaxed)]
        for tensor in tensors:
            said += [tensor.data_ptr() - self._anchor, tensor.nbytes, hash_of(tensor.dtype)]
        return self.memory.meet(self.limit, [*said, *same], own, each)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' copies of a symmetric tensor, by rank."""
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        n = tensor.nbytes
        self.fetch([(out.data_ptr() + p * n, tensor.data_ptr(), n, p) for p in range(self.size)])
        return out

    def fetch(self, plan: Sequence[tuple[int, int, int, int]]) -> None:
        """Copies (own address, symmetric address, bytes, rank) from the ranks."""
        self.memory.transfer(False, plan, self.limit)

    def copies(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' copies of a symmetric tensor, by rank: the memory itself where it can be addressed."""
        if Capability.POINTER in self.memory.capabilities:
            return [self.memory.remote(tensor, p) for p in range(self.size)]
        return list(self.gather(tensor))

    def check_capacity(self, needed: Sequence[int], rows: int) -> None:
        """`needed`: rows that each rank would write. All ranks look at the same numbers."""
        most = max(range(self.size), key=lambda p: needed[p])
        if needed[most] > rows:
            raise InvalidArgumentError(
                f"rank {most} would receive into row {needed[most]} of an out of {rows} rows; nothing was"
                " written",
                culprits=(most,),
                hint="make out larger on all ranks: the rows of all blocks, padding included",
            )


def row_bytes(tensor: torch.Tensor) -> int:
    """Of one index along the first dimension."""
    return tensor.nbytes // tensor.shape[0] if tensor.dim() else tensor.nbytes
