"""Fault kinds with uneven and coalesced collectives and batches of messages, as dumps of NCCL groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import SMALL, STEPS, Case, fault, find, job_of, pick
from .simulated_job import Action, SimulatedJob

_SIZES = (2, 3, 8, 64)


def uneven_training(size: int, steps: int = STEPS) -> SimulatedJob:
    """Returns a job whose steps have uneven and coalesced collectives and a ring of messages in a batch."""
    parts = tuple(100 + 7 * r for r in range(size))
    together = (
        Action("all_reduce", numel=640, red="SUM"),
        Action("all_gather_single", numel=32, out_numel=32 * size),
    )
    programs = []
    for rank in range(size):
        own: list[Action] = []
        for step in range(1, steps + 1):
            around = [
                Action("send", peer=(rank + 1) % size, numel=50, line=85, waits=False, batch=step),
                Action("recv", peer=(rank - 1) % size, numel=50, line=85, waits=False, batch=step),
            ]
            own += [
                Action("all_reduce", numel=2048, red="SUM", line=20, work_us=200),
                Action("reduce_scatter_v", parts=parts, red="SUM", line=81, work_us=100),
                *(around if size > 1 else []),
                Action("sync"),
                Action("coalesced", calls=together, line=86, work_us=50),
                Action("all_gather_v", parts=parts, line=82, work_us=100),
            ]
        programs.append(own)
    return SimulatedJob(size, list(programs))


def nccl(job: SimulatedJob, *expected: tuple[Verdict, list[int]]) -> Case:
    """Returns the case of a job that is read as NCCL's dumps."""
    return Case(job, list(expected), as_dump=True, nccl=True)


def changed(job: SimulatedJob, rng: np.random.Generator, verdict: Verdict, op: str, **what: Any) -> Case:
    """Returns the case in which a random rank changes its fifth operation `op`."""
    bad = pick(rng, job.size)
    job.change(bad, find(job.programs[bad], op, 4), **what)
    return nccl(job, (verdict, [bad]))


@fault(_SIZES)
def healthy_uneven_collectives_of_nccl(size: int, rng: np.random.Generator) -> Case:
    return nccl(uneven_training(size))


@fault(_SIZES)
def healthy_uneven_collectives_of_nccl_overwritten(size: int, rng: np.random.Generator) -> Case:
    """The buffer begins inside a coalesced collective, at another entry on each rank."""
    job = uneven_training(size)
    job.capacity = (2 * size + 9) * STEPS - int(rng.integers(1, 2 * size))
    return nccl(job)


@fault(_SIZES)
def parts_of_a_reduce_scatter_differ(size: int, rng: np.random.Generator) -> Case:
    """One rank has other sizes of the parts, with the same sum."""
    parts = [100 + 7 * r for r in range(size)]
    parts[0], parts[-1] = parts[-1], parts[0]
    job = uneven_training(size)
    return changed(job, rng, Verdict.SPLIT_MISMATCH, "reduce_scatter_v", parts=tuple(parts))


@fault(_SIZES)
def parts_of_an_all_gather_differ(size: int, rng: np.random.Generator) -> Case:
    """One rank contributes more than the others expect."""
    job, bad = uneven_training(size), pick(rng, size)
    at = find(job.programs[bad], "all_gather_v", 4)
    parts = list(job.programs[bad][at].parts)
    parts[bad] += 11
    job.change(bad, at, parts=tuple(parts))
    return nccl(job, (Verdict.SPLIT_MISMATCH, [bad]))


@fault(_SIZES)
def type_of_an_uneven_all_gather_differs(size: int, rng: np.random.Generator) -> Case:
    return changed(uneven_training(size), rng, Verdict.DTYPE_MISMATCH, "all_gather_v", dtype="bfloat16")


@fault(_SIZES)
def size_in_a_coalesced_collective_differs(size: int, rng: np.random.Generator) -> Case:
    job, bad = uneven_training(size), pick(rng, size)
    at = find(job.programs[bad], "coalesced", 4)
    first, *rest = job.programs[bad][at].calls
    job.change(bad, at, calls=(replace(first, numel=641), *rest))
    return nccl(job, (Verdict.SIZE_MISMATCH, [bad]))


@fault(_SIZES)
def leaves_out_a_call_of_a_coalesced_collective(size: int, rng: np.random.Generator) -> Case:
    job, bad = uneven_training(size), pick(rng, size)
    at = find(job.programs[bad], "coalesced", 4)
    job.change(bad, at, calls=job.programs[bad][at].calls[:1])
    return nccl(job, (Verdict.WRONG_OPERATION, [bad]))


@fault((3, 8, 64))
def leaves_out_an_uneven_reduce_scatter(size: int, rng: np.random.Generator) -> Case:
    """It waits in its next batch of messages for ranks that are in the reduce_scatter."""
    job, bad = uneven_training(size), pick(rng, size)
    own = list(job.programs[bad])
    del own[find(own, "reduce_scatter_v", 4)]
    job.programs[bad] = own
    return nccl(job, (Verdict.UNMATCHED_P2P, [bad]))


@fault((3, 8, 64))
def leaves_out_an_uneven_all_gather(size: int, rng: np.random.Generator) -> Case:
    """It continues with the all_reduce of the next step."""
    job, bad = uneven_training(size), pick(rng, size)
    own = list(job.programs[bad])
    del own[find(own, "all_gather_v", 4)]
    job.programs[bad] = own
    return nccl(job, (Verdict.WRONG_OPERATION, [bad]))


@fault(_SIZES)
def never_joins_an_uneven_all_gather(size: int, rng: np.random.Generator) -> Case:
    job, bad = uneven_training(size), pick(rng, size)
    own = list(job.programs[bad])
    job.programs[bad] = own[: find(own, "all_gather_v", STEPS - 1)]
    return nccl(job, (Verdict.NEVER_JOINED, [bad]))


@fault(SMALL)
def leaves_out_a_message_of_a_batch(size: int, rng: np.random.Generator) -> Case:
    """One rank's last batch lacks the send. The next rank waits for it, and all others for these two."""
    job, bad = uneven_training(size), pick(rng, size)
    job.replace_call(bad, find(job.programs[bad], "send", STEPS - 1))
    return nccl(job, (Verdict.UNMATCHED_P2P, [bad]))


@fault(_SIZES)
def cycle_of_two_groups_of_nccl(size: int, rng: np.random.Generator) -> Case:
    """Each of two groups is started on one rank, and scheduled behind the other on the other rank."""
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.one_at_a_time = True
    a, b = sorted(int(r) for r in rng.choice(size, 2, replace=False))
    job.groups = {**job.groups, "left": [a, b], "right": [a, b]}
    for rank, order in ((a, ("left", "right")), (b, ("right", "left"))):
        calls = {
            "left": Action("all_reduce", "left", red="SUM", line=87, waits=False),
            "right": Action("all_gather_v", "right", parts=(9, 4), line=88, waits=False),
        }
        job.programs[rank] = [*job.programs[rank], *(calls[g] for g in order), Action("sync")]
    return nccl(job, (Verdict.WAIT_CYCLE, [a, b]))


@fault(_SIZES)
def uneven_all_gather_never_finishes(size: int, rng: np.random.Generator) -> Case:
    job = uneven_training(size)
    job.stuck = {("world", 4 * STEPS)}
    return nccl(job, (Verdict.NEVER_FINISHED, []))
