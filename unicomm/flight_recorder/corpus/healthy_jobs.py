"""Fault kinds without a fault: healthy jobs, some of them unusual."""

from __future__ import annotations

import numpy as np

from .fault_kinds import LARGE, LONG_RUN, SOME, STEPS, Case, fault, job_of, mesh, pipeline, training
from .simulated_job import Action, SimulatedJob


@fault((2, 8, 256, 16384))
def healthy_training(size: int, rng: np.random.Generator) -> Case:
    return Case(job_of(size, training(3 if size > 1000 else STEPS)), [])


@fault(LARGE)
def healthy_mesh(size: int, rng: np.random.Generator) -> Case:
    return Case(mesh(size)[0], [])


@fault(SOME)
def healthy_pipeline(size: int, rng: np.random.Generator) -> Case:
    return Case(pipeline(size), [])


@fault(SOME)
def healthy_with_skewed_clocks(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(LONG_RUN))
    job.skew_ns = {r: int(rng.integers(-5_000_000_000, 5_000_000_000)) for r in range(size)}
    return Case(job, [])


@fault(SOME)
def healthy_but_wrapped(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.capacity = 16
    return Case(job, [])


@fault((2, 3, 8, 64))
def healthy_with_uneven_work(size: int, rng: np.random.Generator) -> Case:
    """Each rank works longer at times. In a short sample one of them leads by chance."""
    programs = []
    for _ in range(size):
        work = np.where(rng.random(STEPS) < 0.5, 0, rng.uniform(0, 5000, STEPS)) + 200
        programs.append([Action("all_reduce", red="SUM", line=20, work_us=float(w)) for w in work])
    return Case(SimulatedJob(size, list(programs)), [])


@fault(SOME)
def healthy_uneven_exchanges(size: int, rng: np.random.Generator) -> Case:
    """all_to_all_v and all_gather_v with sizes that legally differ by rank."""
    programs = []
    sizes = [10 + 3 * r for r in range(size)]
    for rank in range(size):
        step = [
            Action("all_to_all_v_single", numel=sizes[rank], out_numel=sizes[-1 - rank], line=80),
            Action("all_gather_v", numel=sizes[rank], out_numel=sum(sizes), line=81),
        ]
        programs.append(step * STEPS)
    return Case(SimulatedJob(size, list(programs)), [])


@fault(SOME, dumps=False)
def healthy_with_a_host_not_read(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.hosts = size // 2
    return Case(job, [], without=list(range(job.hosts)))


@fault(SOME, dumps=False)
def healthy_and_running(size: int, rng: np.random.Generator) -> Case:
    """The rings are read while the job runs."""
    job = job_of(size)
    job.live = True
    return Case(job, [])


@fault(SOME)
def healthy_with_checksums(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.checksums = True
    return Case(job, [])


@fault(SOME)
def healthy_messages_with_checksums(size: int, rng: np.random.Generator) -> Case:
    job = pipeline(size)
    job.checksums = True
    return Case(job, [])
