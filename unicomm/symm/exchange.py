"""What the operations above the table have in common: checks, and how the native core runs them.

csrc/symm/composites.cpp moves the data. All read: each rank waits until all are there, looks at what the
others have for it, and copies it. So a rank writes to its own tensors only, and one that gives up spoils
nobody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import InvalidArgumentError
from unicomm.comms.execution.one_sided import fail, issue
from unicomm.comms.memory.symmetric import (
    NoFastExchange,
    SymmetricMemory,
    attached,
    heading,
    memory_of,
    span_of,
)
from unicomm.comms.operations.reduction import RedOpType
from unicomm.comms.operations.symmetric_table import Capability
from unicomm.comms.operations.table import OPERATIONS

Timeout = timedelta | float | None
Refusal = tuple[int, int, int] | None  # csrc/symm/composites.hpp: why, whose, rows
_FULL = 1
_NO_FAST = NoFastExchange()


def fast_of(comm: Communicator) -> Any:
    """What tries to do all of an exchange in one native call."""
    memory = attached(comm._engine)
    return _NO_FAST if memory is None else memory.fast


def done_fast(op: str, comm: Communicator, way: str, *arguments: Any) -> bool:
    """Whether one native call did all of an operation that refuses nothing. Raises its error."""
    done = getattr(fast_of(comm), way)(OPERATIONS[op].code, *arguments)
    if not isinstance(done, bool):
        memory = memory_of(comm._engine, op)
        fail(memory.engine, op, lambda limit: memory.check(done[0], limit))
    return done


class Exchange:
    """One call of an operation: its checks, then its steps within `run`."""

    def __init__(self, op: str, comm: Communicator, timeout: Timeout = None, relaxed: bool = False) -> None:
        self.op = op
        self.memory: SymmetricMemory = memory_of(comm._engine, op)
        self.domain = self.memory.domain
        self.rank, self.size = self.memory.rank, self.memory.size
        self._timeout, self._relaxed = timeout, bool(relaxed)
        self.memory.require(op, Capability.HEAP | Capability.PUT_GET)

    # --- before anything happens -------------------------------------------------------------------------

    def fail(self, message: str, hint: str) -> NoReturn:
        self.memory.engine.invalid(self.op, message, hint)

    def symmetric(self, strided: bool = False, **tensors: Any) -> list[torch.Tensor]:
        """The tensors, or those on arrays' memory."""
        return [
            self.memory.check_symmetric(self.op, name, tensor, strided=strided)
            for name, tensor in tensors.items()
        ]

    def same_dtype(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype != b.dtype:
            self.fail(f"input is of {a.dtype}, out of {b.dtype}", "make them of one dtype")

    def same_rows(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if not a.dim() or not b.dim() or a.shape[1:] != b.shape[1:]:
            self.fail(
                f"input is {tuple(a.shape)}, out {tuple(b.shape)}", "all dimensions but the first must agree"
            )

    def apart(self, **tensors: torch.Tensor) -> None:
        """No two of them share memory."""
        for (a, one), (b, other) in itertools.combinations(tensors.items(), 2):
            if spans_meet(one, other):
                self.fail(f"{a} and {b} share memory, which other ranks read", "pass separate tensors")

    def root(self, name: str, root: Any) -> int:
        return self.memory.engine.check.check_rank(OPERATIONS[self.op], name, root)

    def reduction(self, op: str, dtype: torch.dtype) -> int:
        """The core's number of a reduction by name."""
        try:
            red = RedOpType[op.upper()]
        except (KeyError, AttributeError):
            self.fail(f"reduction {op!r} is unknown", 'it is "sum", "product", "min" or "max"')
        if red in (RedOpType.PREMUL_SUM, RedOpType.AVG) or not self.memory.reduces(dtype, int(red)):
            self.memory.engine.refuse(
                self.op, f"{op} of {dtype} is not defined", 'use "sum", or another dtype'
            )
        return int(red)

    # --- steps --------------------------------------------------------------------------------------------

    def run(
        self,
        steps: Callable[[Any], Any],
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] = (),
        *,
        red: int = 0,
        root: int = -1,
    ) -> None:
        """Issues one operation of the core. `steps` is called with what the ranks compare at its beginning,
        and returns a fault."""

        def job(limit: float) -> None:
            head = heading(self.op, ins[0].dtype, limit, red, root, self._relaxed)
            self.memory.check(steps(head), limit)

        issue(self.memory.engine, self.op, job, inputs=ins, outputs=outs, timeout=self._timeout)

    def run_rows(
        self,
        steps: Callable[[Any], tuple[Any, Refusal]],
        splits: str,
        input: torch.Tensor,
        outs: Sequence[torch.Tensor],
    ) -> None:
        """The same for an exchange of rows, which may refuse `splits` or the size of the first of `outs`."""

        def checked(head: Any) -> Any:
            fault, refusal = steps(head)
            if fault is None:
                raise_refusal(refusal, splits, input, outs[0])
            return fault

        self.run(checked, [input], outs)

    def fast_failed(
        self, result: tuple[Any, Refusal], splits: str, input: torch.Tensor, out: torch.Tensor
    ) -> NoReturn:
        """Raises the error that a fast path returned."""

        def job(limit: float) -> None:
            self.memory.check(result[0], limit)
            raise_refusal(result[1], splits, input, out)

        fail(self.memory.engine, self.op, job)


def spans_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether there is memory between the first and the last element of both."""
    begin, start = a.data_ptr(), b.data_ptr()
    return begin < start + span_of(b) and start < begin + span_of(a)


def raise_refusal(refusal: Refusal, splits: str, input: torch.Tensor, out: torch.Tensor) -> None:
    """All ranks look at the same numbers, so all raise it, with nothing written."""
    if refusal is None:
        return
    why, rank, row = refusal
    if why == _FULL:
        raise InvalidArgumentError(
            f"rank {rank} would receive into row {row} of an out of {out.shape[0]} rows; nothing was written",
            culprits=(rank,),
            hint="make out larger on all ranks: the rows of all blocks, padding included",
        )
    raise InvalidArgumentError(
        f"{splits} of rank {rank} goes beyond the {input.shape[0]} rows of input, or is negative;"
        " nothing was written",
        culprits=(rank,),
        hint="look at how it was computed there",
    )
