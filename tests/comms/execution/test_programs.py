"""Random programs of operations that are pending at the same time, against numpy.

All ranks run the same drawn program: any operations, shapes, splits, roots and reductions, synchronous and
asynchronous mixed, waited for in any order. What each rank must hold in the end is computed by numpy from
what all ranks sent; inputs must be as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comms.calls import COLLECTIVES
from unicomm import Communicator, ReduceOp, Work
from unicomm.testing import run_ranks

Array = np.ndarray[Any, Any]

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
REDUCTIONS: dict[str, tuple[str, ...]] = {
    "float32": (*ARITHMETIC, "AVG", "PREMUL_SUM"),
    "float64": (*ARITHMETIC, "AVG", "PREMUL_SUM"),
    "int8": (*ARITHMETIC, "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR"),
    "int64": (*ARITHMETIC, "AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR"),
    "uint8": (*ARITHMETIC, "BAND", "BOR", "BXOR"),
    "complex64": ("SUM", "PRODUCT"),
    "bool": ("BAND", "BOR", "BXOR"),
}
FOLD = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass
class Step:
    name: str
    dtype: str
    count: int
    sizes: list[list[int]]  # [i][j]: what rank i sends to rank j, where that may differ
    width: int  # elements of a row, where there are rows
    root: int
    red: str
    async_op: bool
    wait_for: int | None  # after this step, for the operation of that number
    seed: int = 0


@st.composite
def programs(draw, n):
    count = st.one_of(st.integers(0, 40), st.sampled_from([64, 65, 1000, 9001]))
    steps = []
    for number in range(draw(st.integers(2, 14))):
        dtype = draw(st.sampled_from(sorted(REDUCTIONS)))
        size = st.integers(0, 5) if draw(st.booleans()) else st.sampled_from([0, 1, 700])
        row = st.lists(size, min_size=n, max_size=n)
        steps.append(
            Step(
                draw(st.sampled_from([*COLLECTIVES, "batch", "around"])),
                dtype,
                draw(count),
                draw(st.lists(row, min_size=n, max_size=n)),
                draw(st.integers(1, 3)),
                draw(st.integers(0, n - 1)),
                draw(st.sampled_from(REDUCTIONS[dtype])),
                draw(st.booleans()),
                draw(st.none() | st.integers(0, number)),
                number,
            )
        )
    return steps


def data(step: Step, rank: int, part: int, size: int) -> Array:
    """What `rank` sends as its `part`: small whole numbers, so that no order of adding matters."""
    drawn = np.random.default_rng([step.seed, rank, part]).integers(-3, 4, size)
    if step.dtype == "complex64":
        return (drawn + 1j * np.roll(drawn, 1)).astype(np.complex64)
    return (drawn % 7 if step.dtype == "uint8" else drawn > 0 if step.dtype == "bool" else drawn).astype(
        step.dtype
    )


def folded(step: Step, parts: list[Array]) -> Array:
    dtype = parts[0].dtype
    if step.red == "PREMUL_SUM":
        parts = [(p * (r + 2)).astype(dtype) for r, p in enumerate(parts)]
    total = reduce(FOLD[step.red], parts)
    if step.red == "AVG":
        return (np.trunc(total / len(parts)) if dtype.kind == "i" else total / dtype.type(len(parts))).astype(
            dtype
        )
    return total


def glue(parts: list[Array]) -> Array:
    return np.concatenate(parts)


class Player:
    """One rank's play of a program."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.me, self.n = comm, comm.get_rank(), comm.get_size()
        self.works: list[Work | None] = []
        self.expected: list[tuple[str, torch.Tensor, Array]] = []

    def give(self, step: Step, what: Array, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
        tensor = torch.from_numpy(what.copy()).reshape(shape)
        self.expected.append((f"{step}: an input", tensor, what))
        return tensor

    def take(self, step: Step, what: Array, shape: tuple[int, ...] = (-1,)) -> torch.Tensor:
        """An output that has to become `what`."""
        tensor = torch.from_numpy(np.ones_like(what)).reshape(shape)
        self.expected.append((f"{step}: an output", tensor, what))
        return tensor

    def change(self, step: Step, before: Array, after: Array) -> torch.Tensor:
        tensor = torch.from_numpy(before.copy())
        self.expected.append((f"{step}: the tensor", tensor, after))
        return tensor

    def play(self, program: list[Step]) -> None:
        for step in program:
            self.works.append(self.issue(step))
            if step.wait_for is not None and (work := self.works[step.wait_for]) is not None:
                work.wait()
        for work in reversed(self.works):
            if work is not None:
                work.wait()
        for label, tensor, what in self.expected:
            assert np.array_equal(tensor.numpy().reshape(-1), what), f"rank {self.me}: {label}"

    def issue(self, step: Step) -> Work | None:
        me, n, comm, count, root = self.me, self.n, self.comm, step.count, step.root
        ranks = range(n)
        op = ReduceOp.PREMUL_SUM(me + 2) if step.red == "PREMUL_SUM" else getattr(ReduceOp, step.red)

        def of(rank: int, part: int = 0, size: int = count) -> Array:
            return data(step, rank, part, size)

        def sent(i: int, j: int, width: int = 1) -> Array:
            return of(i, j, step.sizes[i][j] * width)

        mine, everyone = of(me), [of(r) for r in ranks]
        own = [of(me, j) for j in ranks]
        a: tuple[Any, ...]
        if step.name == "broadcast":
            a = (self.change(step, mine, of(root)), root)
        elif step.name == "all_reduce":
            a = (self.change(step, mine, folded(step, everyone)), op)
        elif step.name == "reduce":
            a = (self.change(step, mine, folded(step, everyone) if me == root else mine), root, op)
        elif step.name == "all_gather":
            a = ([self.take(step, e) for e in everyone], self.give(step, mine))
        elif step.name == "all_gather_v":
            a = ([self.take(step, sent(r, 0)) for r in ranks], self.give(step, sent(me, 0)))
        elif step.name == "all_gather_single":
            a = (self.take(step, glue(everyone)), self.give(step, mine))
        elif step.name == "reduce_scatter":
            a = (
                self.take(step, folded(step, [of(r, me) for r in ranks])),
                [self.give(step, o) for o in own],
                op,
            )
        elif step.name == "reduce_scatter_v":
            parts = [[of(r, j, step.sizes[0][j]) for j in ranks] for r in ranks]
            a = (
                self.take(step, folded(step, [p[me] for p in parts])),
                [self.give(step, o) for o in parts[me]],
                op,
            )
        elif step.name == "reduce_scatter_single":
            a = (self.take(step, folded(step, [of(r, me) for r in ranks])), self.give(step, glue(own)), op)
        elif step.name == "all_to_all_single":
            a = (self.take(step, glue([of(r, me) for r in ranks])), self.give(step, glue(own)))
        elif step.name == "all_to_all_v_single":
            w = step.width
            out, into = ([sent(r, me, w) for r in ranks], [sent(me, r, w) for r in ranks])
            rows = [r[me] for r in step.sizes], step.sizes[me]
            shapes = [(sum(r), w) for r in rows]
            a = (self.take(step, glue(out), shapes[0]), self.give(step, glue(into), shapes[1]), *rows)
        elif step.name == "all_to_all":
            a = ([self.take(step, sent(r, me)) for r in ranks], [self.give(step, sent(me, r)) for r in ranks])
        elif step.name == "barrier":
            a = ()
        elif step.name == "scatter":
            ins = [self.give(step, o) for o in own] if me == root else []
            a = (self.take(step, of(root, me)), ins, root)
        elif step.name == "gather":
            a = ([self.take(step, e) for e in everyone] if me == root else [], self.give(step, mine), root)
        elif step.name == "gather_single":
            a = (self.take(step, glue(everyone)) if me == root else None, self.give(step, mine), root)
        elif step.name == "around":  # the root sends to the next rank
            if me == root:
                return comm.send(self.give(step, mine), (root + 1) % n, step.async_op)
            if me == (root + 1) % n:
                return comm.recv(self.take(step, of(root)), root, step.async_op)
            return None
        else:  # everyone to everyone else, in one batch
            batch = comm.batch_op_create()
            for r in ranks:
                if r != me:
                    batch.send(self.give(step, sent(me, r)), r).recv(self.take(step, sent(r, me)), r)
            return batch.issue(step.async_op)
        work: Work = getattr(comm, step.name)(*a, step.async_op)
        return work


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), n=st.integers(2, 4))
def test_on_shared_memory(data, n):
    program = data.draw(programs(n))
    run_ranks(lambda comm: Player(comm).play(program), n)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), n=st.integers(2, 4))
def test_on_gloo(data, n):
    program = data.draw(programs(n))
    run_ranks(lambda comm: Player(comm).play(program), n, backend="gloo")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(program=programs(3))
def test_with_little_staging_memory(program):
    """Everything then takes several rounds, and messages wait for room."""
    hints = {"slot_bytes": "1", "p2p_bytes": "1"}
    run_ranks(lambda comm: Player(comm).play(program), 3, hints=hints)
