"""A valid call of each collective, as data: for tests that need some operation, or every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from unicomm import Communicator, ReduceOp, Work
from unicomm.comms.operations.table import OPERATIONS, Kind

COLLECTIVES = [name for name, row in OPERATIONS.items() if row.kind is Kind.COLLECTIVE]

Tensor = torch.Tensor


class Call(NamedTuple):
    """`issue(async_op, hints=, timeout=)` calls the operation; `tensors` are all that it reads or writes."""

    issue: Callable[..., Work]
    tensors: list[Tensor]


def call(
    comm: Communicator,
    name: str,
    count: int = 6,
    dtype: torch.dtype = torch.float32,
    root: int = 0,
    op: ReduceOp = ReduceOp.SUM,
    full: Callable[[tuple[int], float], Tensor] = torch.full,
) -> Call:
    """Operation `name` on this rank, with `count` elements as its unit; inputs hold rank + 1, outputs -1.

    `full` makes the tensors.
    """
    n, me = comm.get_size(), comm.get_rank()
    used: list[Tensor] = []

    def tensor(elements: int, value: float) -> Tensor:
        used.append(full((elements,), value).to(dtype))
        return used[-1]

    def many(value: float) -> list[Tensor]:
        return [tensor(count, value) for _ in range(n)]

    def give(elements: int = count) -> Tensor:
        return tensor(elements, me + 1)

    def take(elements: int = count) -> Tensor:
        return tensor(elements, -1 if dtype.is_signed else 9)

    at_root = me == root
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "broadcast": lambda: (give(), root),
        "all_reduce": lambda: (give(), op),
        "reduce": lambda: (give(), root, op),
        "all_gather": lambda: (many(-1), give()),
        "all_gather_v": lambda: (many(-1), give()),
        "all_gather_single": lambda: (take(n * count), give()),
        "reduce_scatter": lambda: (take(), many(me + 1), op),
        "reduce_scatter_v": lambda: (take(), many(me + 1), op),
        "reduce_scatter_single": lambda: (take(), give(n * count), op),
        "all_to_all_single": lambda: (take(n * count), give(n * count)),
        "all_to_all_v_single": lambda: (take(n * count), give(n * count), [count] * n, [count] * n),
        "all_to_all": lambda: (many(-1), many(me + 1)),
        "barrier": lambda: (),
        "scatter": lambda: (take(), many(me + 1) if at_root else [], root),
        "gather": lambda: (many(-1) if at_root else [], give(), root),
        "gather_single": lambda: (take(n * count) if at_root else None, give(), root),
    }
    positional = arguments[name]()

    def issue(async_op: bool, **options: Any) -> Work:
        work: Work = getattr(comm, name)(*positional, async_op, **options)
        return work

    return Call(issue, used)


def check_sum(comm: Communicator) -> Work:
    """A good operation: all ranks get the sum of the ranks' numbers, exactly."""
    n = comm.get_size()
    x = torch.full((5,), float(comm.get_rank()))
    work = comm.all_reduce(x, ReduceOp.SUM, False)
    assert x.tolist() == [n * (n - 1) / 2] * 5
    return work
