"""Random legal programs: the steps of all ranks in one order, which follow from a seed.

Every rank takes the steps of its groups in this order, so that no rank can wait for a later step of another
one. Operations may be asynchronous; a later step waits for them. The ranks work unevenly before a step, each
time another one, so that none is always late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

WORLD = 0  # the number of the group of all ranks
DTYPES = ("float32", "float64", "bfloat16", "int32", "int64")
REDUCTIONS = ("SUM", "MIN", "MAX")
COLLECTIVES = (
    *("all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "all_gather_v"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_v", "all_to_all", "all_to_all_single"),
    *("all_to_all_v_single", "scatter", "gather", "gather_single", "barrier"),
)
# Milliseconds of work before a step: mostly none, sometimes a little, seldom much.
_WORK = ((0.0, 0.0),) * 14 + ((0.0, 3.0),) * 5 + ((5.0, 25.0),)


@dataclass(frozen=True)
class Step:
    """One step of the ranks of a group.

    Attributes:
        what: a collective, "message", "batch", "split" (makes the group), "finalize", or "wait" (for all
            operations that have not been waited for).
        group: its number.
        numel: the elements of each rank's part.
        sizes: the elements that rank i of the group gives to rank j, in uneven operations.
        pairs: sender and receiver of each message, as ranks of the group.
        asynchronous: whether the call returns at once.
        work_ms: how long each rank of the job works before the step.
    """

    what: str
    group: int
    numel: int = 1
    dtype: str = "float32"
    red: str = "SUM"
    root: int = 0
    sizes: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    asynchronous: bool = False
    work_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Program:
    """A program of `size` ranks; `groups` holds the members of each group, the first one all ranks."""

    seed: int
    size: int
    backend: str
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...] = field(repr=False)

    @classmethod
    def of(cls, seed: int) -> Program:
        """Returns the program of a seed."""
        rng = random.Random(seed)
        size, backend = rng.choice((2, 3, 4)), rng.choice(("shm", "gloo"))
        groups = [tuple(range(size))]
        for _ in range(rng.randint(1, 3)):
            members = rng.sample(range(size), rng.randint(2, size))
            groups.append(tuple(members if rng.random() < 0.3 else sorted(members)))
        return cls(seed, size, backend, tuple(groups), tuple(_steps(rng, size, groups)))


def _steps(rng: random.Random, size: int, groups: Sequence[tuple[int, ...]]) -> list[Step]:
    late = rng.randrange(1, len(groups))  # a group that is made in the middle
    out = [Step("split", g) for g in range(1, len(groups)) if g != late]
    loop = [_step(rng, groups, late) for _ in range(rng.randint(2, 6))]  # repeated, as training does
    count = rng.randint(30, 70)
    begins = rng.randrange(count // 2)
    ready = set(range(len(groups))) - {late}
    for number in range(count):
        if number == begins:
            out.append(Step("split", late))
            ready.add(late)
        step = loop[number % len(loop)] if rng.random() < 0.6 else _step(rng, groups, late)
        if step.group not in ready:
            step = _step(rng, groups, late, WORLD)
        work = tuple(rng.uniform(*rng.choice(_WORK)) for _ in range(size))
        out.append(Step(**{**vars(step), "work_ms": work}))
        if rng.random() < 0.15:
            out.append(Step("wait", WORLD))
    out.append(Step("wait", WORLD))
    return out + [Step("finalize", g) for g in range(1, len(groups)) if rng.random() < 0.5]


def _step(rng: random.Random, groups: Sequence[tuple[int, ...]], late: int, group: int = -1) -> Step:
    """Returns a random operation, of a random group if none is given."""
    if group < 0:
        group = rng.choice([WORLD, *range(len(groups)), late])
    n = len(groups[group])
    what = rng.choice([*COLLECTIVES, "message", "message", "batch", "batch"])
    ranks = range(n)
    pairs: list[tuple[int, int]] = []
    if what == "message":
        a, b = rng.sample(ranks, 2)
        pairs = [(a, b)]
    elif what == "batch":
        around = rng.random() < 0.5
        pairs = [(r, (r + 1) % n) for r in ranks] if around else []
        pairs += [(a, b) for a in ranks for b in ranks if a != b and rng.random() < 0.4]
        pairs = pairs or [(0, 1)]
    sizes = tuple(tuple(rng.choice([1, 2, 5, 40]) for _ in ranks) for _ in ranks)
    return Step(
        what,
        group,
        rng.choice([1, 3, 64, 1000, 30000]),
        rng.choice(DTYPES),
        rng.choice(REDUCTIONS),
        rng.randrange(n),
        sizes,
        tuple(pairs),
        rng.random() < 0.4,
    )
