"""The conformance suite: what every backend has to do, whoever wrote it.

    from unicomm.testing import conformance, run_ranks

    @pytest.mark.parametrize("operation", conformance.OPERATIONS)
    @pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
    def test_conformance(operation, world):
        run_ranks(lambda comm: conformance.check(comm, operation), world, backend="mine")

`check` runs an operation for all element types, reductions, sizes and layouts, synchronous and asynchronous,
and compares each result bit by bit with one computed locally: every rank knows what every other rank sends.
A failure raises `ConformanceError`, which names the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from unicomm.comms.communicator import Communicator
from unicomm.comms.errors import UnsupportedError
from unicomm.comms.operations.dtypes import DTYPES
from unicomm.comms.operations.reduction import RedOpType, ReduceOp, why_not
from unicomm.comms.operations.table import OPERATIONS as TABLE
from unicomm.comms.operations.table import Kind

from .ranks import drain

Tensor = torch.Tensor

#: Names of the operations that `check` knows: all that move data.
OPERATIONS = tuple(name for name, row in TABLE.items() if row.kind in (Kind.COLLECTIVE, Kind.P2P)) + (
    "batch",
)

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

    def __str__(self) -> str:
        parts = [self.operation, str(self.dtype).removeprefix("torch."), f"count={self.count}", self.layout]
        if self.op is not None:
            parts.append(repr(self.op))
        parts.append(f"root={self.root}")
        if self.async_op:
            parts.append("async")
        return " ".join(parts)


def cases(operation: str, world: int) -> Iterator[Case]:
    """The cases of one operation on `world` ranks: every value of each axis, not every combination."""
    reduces = operation in TABLE and TABLE[operation].reduces
    plain = ReduceOp.SUM if reduces else None
    last = world - 1
    for dtype in DTYPES:
        yield Case(operation, dtype, op=_defined(plain, dtype), root=last)
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
        for dtype in DTYPES:
            for op in _reductions(world):
                if why_not(op, dtype) is None:
                    yield Case(operation, dtype, 67, op=op)
                    yield Case(operation, dtype, 4099, op=op)


def _defined(op: ReduceOp | None, dtype: torch.dtype) -> ReduceOp | None:
    return ReduceOp.MAX if op is not None and why_not(op, dtype) else op


def _reductions(world: int) -> list[ReduceOp]:
    plain = [ReduceOp(t) for t in RedOpType if t is not RedOpType.PREMUL_SUM]
    return [*plain, ReduceOp.PREMUL_SUM(3.0)]


def has_memory(comm: Communicator) -> bool:
    """Whether the communicator's backend has memory that it moves without staging copies."""
    try:
        return comm.mem_allocator is not None
    except UnsupportedError:
        return False


def check(comm: Communicator, operation: str, only: Callable[[Case], bool] | None = None) -> int:
    """Runs all cases of `operation`; called by all ranks. Returns how many there were."""
    done = 0
    allocates = has_memory(comm)
    for case in cases(operation, comm.get_size()):
        if (only is None or only(case)) and (allocates or case.layout not in ALLOCATED):
            check_case(comm, case)
            done += 1
    return done


def check_case(comm: Communicator, case: Case) -> None:
    """Runs one case; called by all ranks. Raises `ConformanceError` where the result differs."""
    results = _RUN[case.operation](comm, case)
    if not comm.get_capabilities().moves_data:
        return
    for label, got, expected in results:
        _compare(comm, case, label, got, expected)


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


def _empty(comm: Communicator, count: int, case: Case) -> Tensor:
    """An output, filled with something that no operation sends."""
    out = torch.zeros(count, dtype=case.dtype)
    out.view(torch.uint8).fill_(0x55 if case.dtype is not torch.bool else 0)
    return _place(comm, out, case.layout)


def reduced(parts: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """What reducing `parts` in order must give, computed in wide types."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        wide = [p.to(torch.int64) for p in parts]
    elif dtype.is_floating_point:
        wide = [p.to(torch.float64 if dtype is torch.float64 else torch.float32) for p in parts]
    elif dtype.is_complex:
        wide = [p.to(torch.complex128) for p in parts]
    else:
        wide = [p.to(torch.int64) for p in parts]
    factor = 1 if op.factor is None else op.factor if not _whole(dtype) else int(op.factor)
    total = wide[0] * factor
    for part in wide[1:]:
        total = _combine(total, part * factor, op.type)
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


def _combine(a: Tensor, b: Tensor, kind: RedOpType) -> Tensor:
    if kind in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM):
        return a + b
    if kind is RedOpType.PRODUCT:
        return a * b
    if kind is RedOpType.MIN:
        return torch.minimum(a, b)
    if kind is RedOpType.MAX:
        return torch.maximum(a, b)
    if kind is RedOpType.BAND:
        return a & b
    return a | b if kind is RedOpType.BOR else a ^ b


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


# --- one function an operation: runs it, returns (what, got, expected) ----------------------------------

Results = list[tuple[str, Tensor, Tensor]]


def _broadcast(comm: Communicator, case: Case) -> Results:
    x = _place(comm, values(comm.get_rank(), case.count, case.dtype), case.layout)
    comm.broadcast(x, case.root, case.async_op).wait_blocking()
    return [("tensor", x, values(case.root, case.count, case.dtype))]


def _everyone(comm: Communicator, case: Case, count: int | None = None) -> list[Tensor]:
    count = case.count if count is None else count
    return [values(r, count, case.dtype) for r in range(comm.get_size())]


def _all_reduce(comm: Communicator, case: Case) -> Results:
    assert case.op is not None
    x = _place(comm, values(comm.get_rank(), case.count, case.dtype), case.layout)
    comm.all_reduce(x, case.op, case.async_op).wait_blocking()
    return [("tensor", x, reduced(_everyone(comm, case), case.op))]


def _reduce(comm: Communicator, case: Case) -> Results:
    assert case.op is not None
    mine = values(comm.get_rank(), case.count, case.dtype)
    x = _place(comm, mine, case.layout)
    comm.reduce(x, case.root, case.op, case.async_op).wait_blocking()
    root = comm.get_rank() == case.root
    return [("tensor", x, reduced(_everyone(comm, case), case.op) if root else mine)]


def _all_gather(comm: Communicator, case: Case) -> Results:
    x = _place(comm, values(comm.get_rank(), case.count, case.dtype), case.layout)
    outs = [_empty(comm, case.count, case) for _ in range(comm.get_size())]
    comm.all_gather(outs, x, case.async_op).wait_blocking()
    return [(f"tensor_list[{r}]", outs[r], e) for r, e in enumerate(_everyone(comm, case))]


def _uneven(case: Case, rank: int) -> int:
    """Each rank has its own size, some none."""
    return 0 if rank % 3 == 2 else case.count + rank


def _all_gather_v(comm: Communicator, case: Case) -> Results:
    n = comm.get_size()
    x = _place(comm, values(comm.get_rank(), _uneven(case, comm.get_rank()), case.dtype), case.layout)
    outs = [_empty(comm, _uneven(case, r), case) for r in range(n)]
    comm.all_gather_v(outs, x, case.async_op).wait_blocking()
    return [(f"tensor_list[{r}]", outs[r], values(r, _uneven(case, r), case.dtype)) for r in range(n)]


def _all_gather_single(comm: Communicator, case: Case) -> Results:
    n = comm.get_size()
    x = _place(comm, values(comm.get_rank(), case.count, case.dtype), case.layout)
    out = _empty(comm, case.count * n, case)
    comm.all_gather_single(out, x, case.async_op).wait_blocking()
    expected = torch.cat([_bits(e) for e in _everyone(comm, case)])
    in_place = _empty(comm, case.count * n, case).detach().reshape(-1)
    own = in_place.narrow(0, comm.get_rank() * case.count, case.count)
    own.view(torch.uint8).copy_(_bits(x))
    comm.all_gather_single(in_place, own, case.async_op).wait_blocking()
    return [("output", _bits(out), expected), ("output in place", _bits(in_place), expected)]


def _reduce_scatter(comm: Communicator, case: Case) -> Results:
    return _scatter_reductions(comm, case, [case.count] * comm.get_size(), "reduce_scatter")


def _reduce_scatter_v(comm: Communicator, case: Case) -> Results:
    sizes = [_uneven(case, r) for r in range(comm.get_size())]
    return _scatter_reductions(comm, case, sizes, "reduce_scatter_v")


def _scatter_reductions(comm: Communicator, case: Case, sizes: list[int], name: str) -> Results:
    assert case.op is not None
    n, me = comm.get_size(), comm.get_rank()
    before = [values(me, sizes[to], case.dtype, to) for to in range(n)]
    ins = [_place(comm, b, case.layout) for b in before]
    out = _empty(comm, sizes[me], case)
    getattr(comm, name)(out, ins, case.op, case.async_op).wait_blocking()
    expected = reduced([values(r, sizes[me], case.dtype, me) for r in range(n)], case.op)
    kept = [(f"input_list[{r}]", ins[r], before[r]) for r in range(n)]
    return [("output", out, expected), *kept]


def _reduce_scatter_single(comm: Communicator, case: Case) -> Results:
    assert case.op is not None
    n, me = comm.get_size(), comm.get_rank()
    before = _glue([values(me, case.count, case.dtype, to) for to in range(n)], case.dtype)
    x = _place(comm, before, case.layout)
    out = _empty(comm, case.count, case)
    comm.reduce_scatter_single(out, x, case.op, case.async_op).wait_blocking()
    expected = reduced([values(r, case.count, case.dtype, me) for r in range(n)], case.op)
    return [("output", out, expected), ("input", x, before)]


def _glue(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([_bits(p) for p in parts]).view(dtype) if parts else torch.empty(0, dtype=dtype)


def _all_to_all_single(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    x = _place(
        comm, _glue([values(me, case.count, case.dtype, to) for to in range(n)], case.dtype), case.layout
    )
    out = _empty(comm, case.count * n, case)
    comm.all_to_all_single(out, x, case.async_op).wait_blocking()
    return [("output", out, _glue([values(r, case.count, case.dtype, me) for r in range(n)], case.dtype))]


def _rows(case: Case, source: int, to: int) -> int:
    return 0 if (source + to) % 3 == 1 else case.count + 2 * source + to


def _all_to_all_v_single(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    send, receive = [_rows(case, me, to) for to in range(n)], [_rows(case, r, me) for r in range(n)]
    width = 3 if case.layout == "matrix" else 1
    x = _glue([values(me, send[to] * width, case.dtype, to) for to in range(n)], case.dtype)
    out = _empty(comm, sum(receive) * width, Case(case.operation, case.dtype)).reshape(-1)
    if width > 1:
        x, out = x.reshape(-1, width), out.reshape(-1, width)
    else:
        x = _place(comm, x, case.layout)
    comm.all_to_all_v_single(out, x, receive, send, case.async_op).wait_blocking()
    return [
        ("output", out, _glue([values(r, receive[r] * width, case.dtype, me) for r in range(n)], case.dtype))
    ]


def _all_to_all(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    ins = [_place(comm, values(me, _rows(case, me, to), case.dtype, to), case.layout) for to in range(n)]
    outs = [_empty(comm, _rows(case, r, me), case) for r in range(n)]
    comm.all_to_all(outs, ins, case.async_op).wait_blocking()
    return [
        (f"output_tensor_list[{r}]", outs[r], values(r, _rows(case, r, me), case.dtype, me)) for r in range(n)
    ]


def _barrier(comm: Communicator, case: Case) -> Results:
    comm.barrier(case.async_op).wait_blocking()
    return []


def _scatter(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    ins = []
    if me == case.root:
        ins = [_place(comm, values(me, case.count, case.dtype, to), case.layout) for to in range(n)]
    out = _empty(comm, case.count, case)
    comm.scatter(out, ins, case.root, case.async_op).wait_blocking()
    return [("output_tensor", out, values(case.root, case.count, case.dtype, me))]


def _gather(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    x = _place(comm, values(me, case.count, case.dtype), case.layout)
    outs = [_empty(comm, case.count, case) for _ in range(n)] if me == case.root else []
    comm.gather(outs, x, case.root, case.async_op).wait_blocking()
    return [
        (f"output_tensor_list[{r}]", out, e)
        for r, (out, e) in enumerate(zip(outs, _everyone(comm, case), strict=False))
    ]


def _gather_single(comm: Communicator, case: Case) -> Results:
    n, me = comm.get_size(), comm.get_rank()
    x = _place(comm, values(me, case.count, case.dtype), case.layout)
    out = _empty(comm, case.count * n, case) if me == case.root else None
    comm.gather_single(out, x, case.root, case.async_op).wait_blocking()
    return [] if out is None else [("output", out, _glue(_everyone(comm, case), case.dtype))]


def _pairs(comm: Communicator, case: Case) -> Results:
    """Even ranks send to the next one, then receive from it; the last of an odd number sits out."""
    me = comm.get_rank()
    other = me ^ 1
    if other >= comm.get_size():
        return []
    x = _place(comm, values(me, case.count, case.dtype), case.layout)
    y = _empty(comm, case.count, case)
    if me < other:
        comm.send(x, other, case.async_op).wait_blocking()
        comm.recv(y, other, case.async_op).wait_blocking()
    else:
        comm.recv(y, other, case.async_op).wait_blocking()
        comm.send(x, other, case.async_op).wait_blocking()
    return [("tensor", y, values(other, case.count, case.dtype))]


def _batch(comm: Communicator, case: Case) -> Results:
    """Everyone to everyone else, two messages each way, all in one batch."""
    n, me = comm.get_size(), comm.get_rank()
    batch = comm.batch_op_create()
    got: Results = []
    for other in range(n):
        if other == me:
            continue
        for salt in (1, 2):
            y = _empty(comm, case.count, case)
            batch.recv(y, other)
            got.append((f"from {other}", y, values(other, case.count, case.dtype, salt)))
            batch.send(_place(comm, values(me, case.count, case.dtype, salt), case.layout), other)
    if n > 1:
        batch.issue(case.async_op).wait_blocking()
    return got


_RUN: dict[str, Callable[[Communicator, Case], Results]] = {
    "send": _pairs,
    "recv": _pairs,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_v": _all_gather_v,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_v": _reduce_scatter_v,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_v_single": _all_to_all_v_single,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "scatter": _scatter,
    "gather": _gather,
    "gather_single": _gather_single,
    "batch": _batch,
}
