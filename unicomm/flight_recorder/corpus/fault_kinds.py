"""Case and FaultKind, and programs without a fault, from which the kinds are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict
from unicomm.flight_recorder.table.table import Table

from .nccl_dump import nccl_table
from .simulated_job import Action, SimulatedJob

STEPS = 12
LONG_RUN = 40  # steps of jobs with late ranks


@dataclass
class Case:
    """A job and its expected findings.

    Attributes:
        expected: the verdict and the culprits of each fault; empty for a healthy job.
        without: the ranks whose files are missing.
        as_dump: whether the job is read as torch's dumps, which have no roots, reductions, errors and states
            of processes.
        nccl: whether the job is read as dumps that torch's NCCL group writes.
        status: whether the dumps have the status of the groups, which is right also for overwritten entries.
    """

    job: SimulatedJob
    expected: list[tuple[Verdict, list[int]]]
    without: list[int] = field(default_factory=list)
    as_dump: bool = False
    nccl: bool = False
    status: bool = True
    name: str = ""

    def table(self) -> Table:
        """Runs the job, if it has not run, and returns its table."""
        if not self.job.events:
            self.job.run()
        if self.nccl:
            return nccl_table(self.job)
        return self.job.table(self.without, self.as_dump, self.status)


Make = Callable[[int, np.random.Generator], Case]


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: `make` makes a case of a given number of ranks."""

    name: str
    make: Make
    sizes: tuple[int, ...]
    dumps: bool = True  # whether torch's dumps contain enough to recognize it


KINDS: list[FaultKind] = []
SMALL, SOME, LARGE = (3, 4, 8), (4, 8, 64), (4, 16, 256)


def fault(sizes: tuple[int, ...] = SOME, dumps: bool = True) -> Callable[[Make], Make]:
    """Registers a function as a fault kind. `sizes` are the numbers of ranks; see `FaultKind` for `dumps`."""

    def register(make: Make) -> Make:
        KINDS.append(FaultKind(make.__name__.strip("_").replace("_", "-"), make, sizes, dumps))
        return make

    return register


def training(steps: int = STEPS) -> list[Action]:
    """Returns a program in one group: two gradients, a norm and a parameter broadcast in each step."""
    out = []
    for _ in range(steps):
        out += [
            Action("all_reduce", numel=4096, red="SUM", line=20, work_us=400),
            Action("all_reduce", numel=512, red="SUM", line=21, work_us=100),
            Action("all_gather_single", numel=64, line=24, work_us=50),
            Action("broadcast", numel=128, root=0, line=30, work_us=50),
        ]
    return out


def job_of(size: int, program: list[Action] | None = None) -> SimulatedJob:
    """Returns a job in which all ranks run the same program, by default `training()`."""
    own = training() if program is None else program
    return SimulatedJob(size, [own] * size)


def mesh(size: int, steps: int = 6) -> tuple[SimulatedJob, int]:
    """Returns a job with tensor parallel groups "tpK" and data parallel "dpK", and the size of "tpK"."""
    tp = 2 if size < 8 else 4
    groups: dict[str, list[int]] = {}
    for k in range(size // tp):
        groups[f"tp{k}"] = list(range(k * tp, (k + 1) * tp))
    for k in range(tp):
        groups[f"dp{k}"] = list(range(k, size, tp))
    programs = []
    for rank in range(size):
        step = [
            Action("all_reduce", f"tp{rank // tp}", 256, red="SUM", line=40, work_us=100),
            Action("all_reduce", f"tp{rank // tp}", 256, red="SUM", line=44, work_us=100),
            Action("reduce_scatter_single", f"dp{rank % tp}", 1024, 256, red="SUM", line=50, work_us=100),
            Action("all_gather_single", f"dp{rank % tp}", 256, 1024, line=55, work_us=100),
        ]
        programs.append(step * steps)
    return SimulatedJob(size, list(programs), groups), tp


def pipeline(size: int) -> SimulatedJob:
    """Returns a job in which each rank receives from the previous rank and sends to the next."""
    programs = []
    for rank in range(size):
        own = []
        for _ in range(6):
            if rank > 0:
                own.append(Action("recv", peer=rank - 1, line=60, work_us=20))
            if rank < size - 1:
                own.append(Action("send", peer=rank + 1, line=64, work_us=100))
        own += [Action("barrier", line=70)]
        programs.append(own)
    return SimulatedJob(size, list(programs))


def find(program: Sequence[Action], op: str, nth: int) -> int:
    """Returns the position of the operation `op` number `nth` in a program, from 0."""
    return [i for i, call in enumerate(program) if call.op == op][nth]


def pick(rng: np.random.Generator, size: int) -> int:
    """Returns a random rank."""
    return int(rng.integers(size))


def wrong_call(
    job: SimulatedJob, rng: np.random.Generator, verdict: Verdict, op: str, nth: int, /, **what: Any
) -> Case:
    """Returns the case in which a random rank changes fields of its operation `op` number `nth`, from 0."""
    bad = pick(rng, job.size)
    job.change(bad, find(job.programs[bad], op, nth), **what)
    return Case(job, [(verdict, [bad])])


def alive_until(
    job: SimulatedJob, rng: np.random.Generator, verdict: Verdict, at: int, op: str = "", fate: str = ""
) -> Case:
    """Returns the case in which a random rank of a live job leaves its program at action `at`.

    Args:
        op: the action that replaces action `at`: "leave", "die", "stop" or "end"; "" for none.
        fate: what happens to the rank inside action `at`, without `op`.
    """
    job.live = True
    bad = pick(rng, job.size)
    if op:
        job.replace_call(bad, at, Action(op))
    else:
        job.change(bad, at, fate=fate)
    return Case(job, [(verdict, [bad])])
