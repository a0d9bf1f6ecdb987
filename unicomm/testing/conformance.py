"""The conformance suite: what every backend has to do, whoever wrote it.

    from unicomm.testing import conformance, run_ranks

    @pytest.mark.parametrize("operation", conformance.OPERATIONS)
    @pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
    def test_conformance(operation, world):
        run_ranks(lambda comm: conformance.check(comm, operation), world, backend="mine")

`check` runs an operation for all element types, reductions, sizes and layouts, synchronous and asynchronous,
and compares each result bit by bit with one computed locally: every rank knows what every other rank sends.
A failure raises `ConformanceError`, which names the case.

`check_rounding` does the same with narrow floats that show whether they are accumulated in float32 and
rounded once, as `ReduceOp` promises for the CPU.

`check_option` runs the operations on a communicator with a hint of `OPTIONS`, and those cases whose results
the hint must leave as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.operations import reproducible, wire
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, ReproducibleOp, why_not
from unicomm.comms.operations.table import OPERATIONS as TABLE
from unicomm.comms.operations.table import Kind

from .narrow_values import NARROW, ROUNDED, narrow_values
from .ranks import drain

Tensor = torch.Tensor

#: Names of the operations that `check` knows: all that move data.
OPERATIONS = tuple(name for name, row in TABLE.items() if row.kind in (Kind.COLLECTIVE, Kind.P2P)) + (
    "batch",
)

#: The operations that `check_rounding` knows.
REDUCTIONS = tuple(name for name in OPERATIONS if name in TABLE and TABLE[name].reduces)

#: Elements. The largest goes through several rounds of every transport.
SIZES = (0, 1, 3, 17, 1000, 70001)
#: How a tensor lies in memory; all are contiguous, which operations require.
LAYOUTS = ("flat", "matrix", "offset", "parameter")
#: On a backend that allocates: in its memory, and there on the even ranks only.
ALLOCATED = ("allocated", "partly allocated")
_ONE_SIZE = 17


class ConformanceError(AssertionError):
    """A backend did something else than the operation table says."""


@dataclass(frozen=True)
class Case:
    operation: str
    dtype: torch.dtype = torch.float32
    count: int = _ONE_SIZE
    layout: str = "flat"
    op: ReduceOp | None = None
    async_op: bool = False
    root: int = 0
    rounds: bool = False  # the values are those of narrow_values.py

    def __str__(self) -> str:
        parts = [self.operation, str(self.dtype).removeprefix("torch."), f"count={self.count}", self.layout]
        if self.op is not None:
            parts.append(repr(self.op))
        parts.append(f"root={self.root}")
        if self.rounds:
            parts.append("narrow values")
        if self.async_op:
            parts.append("async")
        return " ".join(parts)


def cases(operation: str, world: int) -> Iterator[Case]:
    """The cases of one operation on `world` ranks: every value of each axis, not every combination."""
    reduces = operation in TABLE and TABLE[operation].reduces
    plain = ReduceOp.SUM if reduces else None
    last = world - 1
    for dtype in DTYPES:
        defined = ReduceOp.MAX if plain is not None and why_not(plain, dtype) else plain
        yield Case(operation, dtype, op=defined, root=last)
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            yield Case(operation, dtype, count, op=plain)
    for layout in LAYOUTS:
        yield Case(operation, torch.float64, 24, layout, op=plain)
    for layout in ALLOCATED:
        for count in (24, 70001, 200003):
            yield Case(operation, torch.float32, count, layout, op=plain, root=count % world)
    for async_op in (True, False, True):
        yield Case(operation, torch.int64, 1000, op=plain, async_op=async_op, root=last)
    if reduces:
        reductions = [ReduceOp(t) for t in RedOpType if t is not RedOpType.PREMUL_SUM]
        for dtype in DTYPES:
            for op in (*reductions, ReduceOp.PREMUL_SUM(3.0)):
                if why_not(op, dtype) is None:
                    yield Case(operation, dtype, 67, op=op)
                    yield Case(operation, dtype, 4099, op=op)


def has_memory(comm: Communicator) -> bool:
    """Whether the communicator's backend has memory that it moves without staging copies."""
    try:
        return comm.mem_allocator is not None
    except UnsupportedError:
        return False


def check(comm: Communicator, operation: str, only: Callable[[Case], bool] | None = None) -> int:
    """Runs all cases of `operation`, or those for which `only(case)` is true; called by all ranks.

    Returns how many there were. Raises `ConformanceError` where the result differs.
    """
    done = 0
    allocates = has_memory(comm)
    for case in cases(operation, comm.get_size()):
        if (only is None or only(case)) and (allocates or case.layout not in ALLOCATED):
            check_case(comm, case)
            done += 1
    return done


def check_rounding(comm: Communicator, operation: str) -> int:
    """Runs a reduction of narrow floats whose results show any second rounding; called by all ranks."""
    done = 0
    for dtype in NARROW:
        for op in ROUNDED:
            for count in (67, 4099):
                check_case(
                    comm, Case(operation, dtype, count, op=op, root=count % comm.get_size(), rounds=True)
                )
                done += 1
    return done


def check_case(comm: Communicator, case: Case) -> None:
    """Runs one case; called by all ranks. Raises `ConformanceError` where the result differs."""
    results: Results = getattr(_Run(comm, case), case.operation)()
    if not comm.get_capabilities().moves_data:
        return
    for label, got, expected in results:
        _compare(comm, case, label, got, expected)


# --- options -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A hint of a communicator.

    Attributes:
        hints: for `new_comm` or `split`.
        operations: those that run in another way with it.
        keeps: of a case and the number of ranks, whether the result must be what it is without the hint.
    """

    hints: Mapping[str, str | bool]
    operations: tuple[str, ...]
    keeps: Callable[[Case, int], bool]


def _encoded_exactly(form: wire.WireFormat, case: Case, world: int) -> bool:
    # Sums of these small whole numbers have few bits, so every format keeps them, but for some factors.
    scaled = case.op is not None and case.op.type in (RedOpType.AVG, RedOpType.PREMUL_SUM)
    keeps = form is wire.WireFormat.INT8 and world == 4
    return case.dtype.is_floating_point and (keeps or not scaled)


def _reproducible(case: Case, world: int) -> bool:
    assert case.op is not None
    inexact = (RedOpType.PRODUCT, RedOpType.PREMUL_SUM, RedOpType.AVG)
    return case.dtype in reproducible.DTYPES and case.op.type not in inexact


#: The options of operations, by a name for each.
OPTIONS = {
    **{
        f"wire={form.text}": Option(
            {"wire": form.text}, tuple(sorted(wire.OPERATIONS)), partial(_encoded_exactly, form)
        )
        for form in wire.WireFormat
    },
    "reduction=reproducible": Option({"reduction": "reproducible"}, REDUCTIONS, _reproducible),
    "checksum": Option({"checksum": True}, OPERATIONS, lambda case, world: case.count != 4099),
}


def check_option(comm: Communicator, name: str, only: Callable[[Case], bool] | None = None) -> int:
    """Runs the operations of an option; called by all ranks of a communicator that has its hints.

    Args:
        name: of the option in `OPTIONS`.
        only: of those cases whose results the option keeps, chooses those to run.

    Returns the least number of cases of an operation. Raises `ConformanceError` where a result differs.
    """
    option, world = OPTIONS[name], comm.get_size()

    def chosen(case: Case) -> bool:
        return option.keeps(case, world) and (only is None or only(case))

    return min(check(comm, operation, chosen) for operation in option.operations)


# --- data --------------------------------------------------------------------------------------------


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What `rank` sends: small whole numbers, so that sums of 8 ranks are exact in most types."""
    i = torch.arange(count, dtype=torch.int64)
    wide = (i * 7 + rank * 3 + salt * 5) % 4 + 1
    if dtype.is_signed or dtype.is_complex:
        wide = torch.where((i + rank) % 5 == 0, -wide, wide)
    if dtype is torch.bool:
        return (i + rank + salt) % 3 == 0
    if dtype.is_complex:
        return torch.complex(wide.double(), (wide % 3).double()).to(dtype)
    return wide.to(dtype)


# Ranks that are threads, and cases that differ in the reduction alone, have the same values. Nobody writes
# into them: an operation gets copies.
_values = lru_cache(maxsize=128)(values)


def _place(comm: Communicator, tensor: Tensor, layout: str) -> Tensor:
    """The same values on the communicator's device, lying in memory as `layout` says."""
    if comm.get_device().type not in ("cpu", "meta"):
        tensor = tensor.to(comm.get_device())
    if layout == "matrix" and tensor.numel() % 4 == 0:
        return tensor.reshape(4, -1).clone()
    if layout == "offset":
        room = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
        room[3:] = tensor
        return room[3:]
    if layout == "allocated" or (layout == "partly allocated" and comm.get_rank() % 2 == 0):
        return comm.mem_allocator.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if layout == "parameter" and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return torch.nn.Parameter(tensor.clone())
    return tensor.clone()


def reduced(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """What reducing `parts` in order must give, computed in wide types."""
    dtype = parts[0].dtype
    if dtype.is_floating_point:
        wider = torch.float64 if dtype is torch.float64 else torch.float32
    else:
        wider = torch.complex128 if dtype.is_complex else torch.int64
    wide = [p.to(wider) for p in parts]
    factor = 1 if op.factor is None else op.factor if not _whole(dtype) else int(op.factor)
    total = wide[0] * factor
    for part in wide[1:]:
        total = _COMBINE.get(op.type, torch.add)(total, part * factor)
    if dtype is torch.bool:
        return total % 2 == 1 if op.type is RedOpType.BXOR else total > 0
    if op.type is RedOpType.AVG:
        n = len(parts)
        if _whole(dtype):
            total = total.to(dtype).to(torch.int64)  # sums wrap around before they are divided
            return torch.div(total, n, rounding_mode="trunc").to(dtype)
        if dtype.is_complex:  # both parts by themselves; torch divides complex numbers differently
            return torch.view_as_complex(torch.view_as_real(total.to(dtype)) / n)
        total = total / n
    if dtype is torch.float8_e4m3fn:  # what is too large is the largest, which torch before 2.13 makes NaN
        total = total.clamp(-448.0, 448.0)
    return total.to(dtype)


def _whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


_COMBINE: dict[RedOpType | ReproducibleOp, Callable[[Tensor, Tensor], Tensor]] = {
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}  # the others add


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()


def _compare(comm: Communicator, case: Case, label: str, got: Tensor, expected: Tensor) -> None:
    try:
        drain(comm, comm.get_options().timeout)
    except TimeoutError as error:
        raise ConformanceError(f"{case}: {error}") from None
    a, b = _bits(got), _bits(expected)
    if torch.equal(a, b):
        return
    where = f"rank {comm.get_rank()} of {comm.get_size()} on {comm.get_backend()}: {case}: {label}"
    if a.numel() != b.numel():
        raise ConformanceError(f"{where} has {a.numel()} bytes instead of {b.numel()}")
    at = int((a != b).nonzero()[0]) // got.element_size()
    raise ConformanceError(
        f"{where}[{at}] is {got.detach().reshape(-1)[at]}, expected {expected.reshape(-1)[at]}"
    )


# --- one method an operation ----------------------------------------------------------------------------

Results = list[tuple[str, Tensor, Tensor]]


class _Run:
    """One case on one rank. The method of an operation's name runs it, and returns (what, got, expected)."""

    def __init__(self, comm: Communicator, case: Case) -> None:
        self.comm, self.case = comm, case
        self.n, self.me = comm.get_size(), comm.get_rank()

    @property
    def op(self) -> ReduceOp:
        assert self.case.op is not None
        return self.case.op

    def values(self, rank: int, salt: int = 0, count: int | None = None) -> Tensor:
        """What `rank` sends; as many elements as the case says, or `count`."""
        count = self.case.count if count is None else count
        if self.case.rounds:
            return narrow_values(rank, self.n, count, self.case.dtype, self.op, salt)
        return _values(rank, count, self.case.dtype, salt)

    def placed(self, tensor: Tensor) -> Tensor:
        return _place(self.comm, tensor, self.case.layout)

    def empty(self, count: int | None = None) -> Tensor:
        """An output, filled with something that no operation sends."""
        out = torch.zeros(self.case.count if count is None else count, dtype=self.case.dtype)
        out.view(torch.uint8).fill_(0x55 if self.case.dtype is not torch.bool else 0)
        return self.placed(out)

    def everyone(self, salt: int = 0, count: int | None = None) -> list[Tensor]:
        """What each rank sends."""
        return [self.values(r, salt, count) for r in range(self.n)]

    def for_each(self) -> list[Tensor]:
        """What this rank sends to each."""
        return [self.values(self.me, to) for to in range(self.n)]

    def glue(self, parts: Sequence[Tensor]) -> Tensor:
        dtype = self.case.dtype
        return torch.cat([_bits(p) for p in parts]).view(dtype) if parts else torch.empty(0, dtype=dtype)

    def broadcast(self) -> Results:
        x = self.placed(self.values(self.me))
        self.comm.broadcast(x, self.case.root, self.case.async_op).wait_blocking()
        return [("tensor", x, self.values(self.case.root))]

    def all_reduce(self) -> Results:
        x = self.placed(self.values(self.me))
        self.comm.all_reduce(x, self.op, self.case.async_op).wait_blocking()
        return [("tensor", x, reduced(self.everyone(), self.op))]

    def reduce(self) -> Results:
        mine = self.values(self.me)
        x = self.placed(mine)
        self.comm.reduce(x, self.case.root, self.op, self.case.async_op).wait_blocking()
        return [("tensor", x, reduced(self.everyone(), self.op) if self.me == self.case.root else mine)]

    def all_gather(self) -> Results:
        return self._gather_lists("all_gather", [self.case.count] * self.n)

    def all_gather_v(self) -> Results:
        return self._gather_lists("all_gather_v", self._uneven())

    def _uneven(self) -> list[int]:
        """Each rank has its own size, some none."""
        return [0 if rank % 3 == 2 else self.case.count + rank for rank in range(self.n)]

    def _gather_lists(self, name: str, sizes: list[int]) -> Results:
        x = self.placed(self.values(self.me, count=sizes[self.me]))
        outs = [self.empty(size) for size in sizes]
        getattr(self.comm, name)(outs, x, self.case.async_op).wait_blocking()
        return [(f"tensor_list[{r}]", outs[r], self.values(r, count=sizes[r])) for r in range(self.n)]

    def all_gather_single(self) -> Results:
        count = self.case.count
        x = self.placed(self.values(self.me))
        out = self.empty(count * self.n)
        self.comm.all_gather_single(out, x, self.case.async_op).wait_blocking()
        expected = torch.cat([_bits(e) for e in self.everyone()])
        in_place = self.empty(count * self.n).detach().reshape(-1)
        own = in_place.narrow(0, self.me * count, count)
        own.view(torch.uint8).copy_(_bits(x))
        self.comm.all_gather_single(in_place, own, self.case.async_op).wait_blocking()
        return [("output", _bits(out), expected), ("output in place", _bits(in_place), expected)]

    def reduce_scatter(self) -> Results:
        return self._reduce_lists("reduce_scatter", [self.case.count] * self.n)

    def reduce_scatter_v(self) -> Results:
        return self._reduce_lists("reduce_scatter_v", self._uneven())

    def _reduce_lists(self, name: str, sizes: list[int]) -> Results:
        before = [self.values(self.me, to, size) for to, size in enumerate(sizes)]
        ins = [self.placed(b) for b in before]
        out = self.empty(sizes[self.me])
        getattr(self.comm, name)(out, ins, self.op, self.case.async_op).wait_blocking()
        expected = reduced(self.everyone(self.me, sizes[self.me]), self.op)
        kept = [(f"input_list[{r}]", ins[r], before[r]) for r in range(self.n)]
        return [("output", out, expected), *kept]

    def reduce_scatter_single(self) -> Results:
        before = self.glue(self.for_each())
        x, out = self.placed(before), self.empty()
        self.comm.reduce_scatter_single(out, x, self.op, self.case.async_op).wait_blocking()
        return [("output", out, reduced(self.everyone(self.me), self.op)), ("input", x, before)]

    def all_to_all_single(self) -> Results:
        x, out = self.placed(self.glue(self.for_each())), self.empty(self.case.count * self.n)
        self.comm.all_to_all_single(out, x, self.case.async_op).wait_blocking()
        return [("output", out, self.glue(self.everyone(self.me)))]

    def _rows(self) -> tuple[list[int], list[int]]:
        """How many rows this rank sends to each, and receives from each."""

        def between(source: int, to: int) -> int:
            return 0 if (source + to) % 3 == 1 else self.case.count + 2 * source + to

        return [between(self.me, r) for r in range(self.n)], [between(r, self.me) for r in range(self.n)]

    def all_to_all_v_single(self) -> Results:
        send, receive = self._rows()
        width = 3 if self.case.layout == "matrix" else 1
        x = self.glue([self.values(self.me, to, rows * width) for to, rows in enumerate(send)])
        out = _Run(self.comm, replace(self.case, layout="flat")).empty(sum(receive) * width)
        if width > 1:
            x, out = x.reshape(-1, width), out.reshape(-1, width)
        else:
            x = self.placed(x)
        self.comm.all_to_all_v_single(out, x, receive, send, self.case.async_op).wait_blocking()
        expected = [self.values(r, self.me, rows * width) for r, rows in enumerate(receive)]
        return [("output", out, self.glue(expected))]

    def all_to_all(self) -> Results:
        send, receive = self._rows()
        ins = [self.placed(self.values(self.me, to, rows)) for to, rows in enumerate(send)]
        outs = [self.empty(rows) for rows in receive]
        self.comm.all_to_all(outs, ins, self.case.async_op).wait_blocking()
        expected = [self.values(r, self.me, rows) for r, rows in enumerate(receive)]
        return [(f"output_tensor_list[{r}]", outs[r], expected[r]) for r in range(self.n)]

    def barrier(self) -> Results:
        self.comm.barrier(self.case.async_op).wait_blocking()
        return []

    def scatter(self) -> Results:
        ins = [self.placed(part) for part in self.for_each()] if self.me == self.case.root else []
        out = self.empty()
        self.comm.scatter(out, ins, self.case.root, self.case.async_op).wait_blocking()
        return [("output_tensor", out, self.values(self.case.root, self.me))]

    def gather(self) -> Results:
        x = self.placed(self.values(self.me))
        outs = [self.empty() for _ in range(self.n)] if self.me == self.case.root else []
        self.comm.gather(outs, x, self.case.root, self.case.async_op).wait_blocking()
        return [(f"output_tensor_list[{r}]", out, self.values(r)) for r, out in enumerate(outs)]

    def gather_single(self) -> Results:
        x = self.placed(self.values(self.me))
        out = self.empty(self.case.count * self.n) if self.me == self.case.root else None
        self.comm.gather_single(out, x, self.case.root, self.case.async_op).wait_blocking()
        return [] if out is None else [("output", out, self.glue(self.everyone()))]

    def send(self) -> Results:
        """Even ranks send to the next one, then receive from it; the last of an odd number sits out."""
        other = self.me ^ 1
        if other >= self.n:
            return []
        x, y = self.placed(self.values(self.me)), self.empty()
        calls = [(self.comm.send, x), (self.comm.recv, y)]
        for call, tensor in calls if self.me < other else reversed(calls):
            call(tensor, other, self.case.async_op).wait_blocking()
        return [("tensor", y, self.values(other))]

    recv = send

    def batch(self) -> Results:
        """Everyone to everyone else, two messages each way, all in one batch."""
        batch = self.comm.batch_op_create()
        got: Results = []
        for other in (*range(self.me), *range(self.me + 1, self.n)):
            for salt in (1, 2):
                y = self.empty()
                batch.recv(y, other)
                got.append((f"from {other}", y, self.values(other, salt)))
                batch.send(self.placed(self.values(self.me, salt)), other)
        if self.n > 1:
            batch.issue(self.case.async_op).wait_blocking()
        return got
