"""Fault kinds of transport, time, data, membership and lost records, and with two faults."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import LARGE, LONG_RUN, STEPS, Case, fault, find, job_of, mesh, pick, pipeline, training
from .simulated_job import Action, SimulatedJob


@fault()
def never_finishes_anywhere(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.stuck = {("world", 21)}
    return Case(job, [(Verdict.NEVER_FINISHED, [])])


@fault()
def never_finishes_on_one(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    bad = pick(rng, size)
    job.stuck = {("world", 21)}
    job.partly = set(range(size)) - {bad}
    return Case(job, [(Verdict.NEVER_FINISHED, [bad])])


@fault()
def never_begins_on_one(size: int, rng: np.random.Generator) -> Case:
    """The operation is issued, but the device never starts it."""
    job = job_of(size)
    bad = pick(rng, size)
    job.stuck, job.unstarted = {("world", 21)}, {bad}
    return Case(job, [(Verdict.NEVER_FINISHED, [bad])])


@fault()
def message_never_finishes_and_holds_up_a_queue(size: int, rng: np.random.Generator) -> Case:
    """Both sides are in the message. A collective is queued behind it on one of them."""
    job = job_of(size, [Action("all_reduce", red="SUM", line=20)] * 4)
    job.one_at_a_time = True
    a, b = (int(r) for r in rng.choice(size, 2, replace=False))
    job.stuck = {("world", a, b, 1)}
    for rank, op in ((a, "send"), (b, "recv")):
        own = [Action(op, peer=a + b - rank, line=49, waits=False), Action("barrier", line=51, waits=False)]
        job.programs[rank] = [*job.programs[rank], *own, Action("sync")]
    return Case(job, [(Verdict.NEVER_FINISHED, sorted((a, b)))])


def _ends_with_other_bits(size: int, wrong: list[int]) -> SimulatedJob:
    """Returns a job that ends when the ranks compare the results of its operation 17, an all_reduce."""
    job = job_of(size, training()[:18])
    job.checksums = True
    job.flips = {(rank, 17) for rank in wrong}
    return job


@fault()
def one_result_has_other_bits(size: int, rng: np.random.Generator) -> Case:
    bad = pick(rng, size)
    return Case(_ends_with_other_bits(size, [bad]), [(Verdict.SILENT_CORRUPTION, [bad])])


@fault((2, 4))
def half_of_the_results_have_other_bits(size: int, rng: np.random.Generator) -> Case:
    """There is no majority."""
    bad = [int(r) for r in rng.choice(size, size // 2, replace=False)]
    return Case(_ends_with_other_bits(size, bad), [(Verdict.SILENT_CORRUPTION, list(range(size)))])


@fault()
def a_message_arrives_with_other_bits(size: int, rng: np.random.Generator) -> Case:
    job = pipeline(size)
    job.checksums = True
    bad = 1 + pick(rng, size - 1)
    job.flips = {(bad, find(job.programs[bad], "recv", 3))}
    return Case(job, [(Verdict.SILENT_CORRUPTION, [bad - 1, bad])])


@fault((4, 8, 64, 1024))
def always_late(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(7 if size > 1000 else LONG_RUN))
    bad = pick(rng, size)
    job.late_us = {bad: 800.0}
    return Case(job, [(Verdict.SLOW, [bad])])


@fault()
def always_late_with_skewed_clocks(size: int, rng: np.random.Generator) -> Case:
    case = always_late(size, rng)
    case.job.skew_ns = {r: int(rng.integers(-3_000_000_000, 3_000_000_000)) for r in range(size)}
    return case


@fault((8, 64))
def slow_host(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(LONG_RUN))
    job.hosts = size // 4
    host = pick(rng, 4)
    bad = list(range(host * job.hosts, (host + 1) * job.hosts))
    job.late_us = dict.fromkeys(bad, 900.0)
    return Case(job, [(Verdict.SLOW, bad)])


@fault(LARGE)
def slow_in_a_mesh(size: int, rng: np.random.Generator) -> Case:
    """The victims are late in their other groups, but are not culprits."""
    job, _ = mesh(size, LONG_RUN)
    bad = pick(rng, size)
    job.late_us = {bad: 900.0}
    return Case(job, [(Verdict.SLOW, [bad])])


@fault()
def members_differ(size: int, rng: np.random.Generator) -> Case:
    job, tp = mesh(size)
    group = f"tp{size // tp - 1}" if tp > 2 else "world"
    ranks = list(job.groups[group])
    bad = ranks[1]
    job.members = {(bad, group): [*ranks[:-1], (ranks[-1] + 1) % size] if group != "world" else ranks[:-1]}
    if group == "world":
        for rank in range(size):
            job.programs[rank] = [*job.programs[rank], Action("barrier", line=71)]
    return Case(job, [(Verdict.MEMBERSHIP, [bad])])


@fault((8, 16, 256))
def two_groups_each_with_a_fault(size: int, rng: np.random.Generator) -> Case:
    """Two data parallel groups: in one a rank does not join, in the other a rank calls another operation."""
    half = size // 2
    groups = {"dp0": list(range(half)), "dp1": list(range(half, size))}
    step = [
        [Action("all_reduce", f"dp{i}", 512, red="SUM", line=20), Action("barrier", f"dp{i}", line=22)]
        for i in (0, 1)
    ]
    job = SimulatedJob(size, [step[r // half] * STEPS for r in range(size)], groups)
    away, wrong = pick(rng, half), half + pick(rng, half)
    job.programs[away] = list(job.programs[away])[:15]
    job.change(wrong, 12, op="reduce_scatter_single", line=94)
    return Case(job, [(Verdict.NEVER_JOINED, [away]), (Verdict.WRONG_OPERATION, [wrong])])


@fault((8, 64), dumps=False)
def one_killed_and_one_stopped(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.live = True
    dead, still = (int(r) for r in rng.choice(size, 2, replace=False))
    job.change(dead, 13, fate="die")
    job.replace_call(still, 13, Action("stop"))
    return Case(job, [(Verdict.PROCESS_DEAD, [dead]), (Verdict.PROCESS_STOPPED, [still])])


@fault((8, 64))
def wrong_size_then_stays_away(size: int, rng: np.random.Generator) -> Case:
    """Silent corruption early, and later another rank that does not join."""
    job = job_of(size)
    small, away = (int(r) for r in rng.choice(size, 2, replace=False))
    job.change(small, find(job.programs[small], "all_reduce", 3), numel=7, loose=True)
    job.programs[away] = training(STEPS - 2)
    return Case(job, [(Verdict.NEVER_JOINED, [away]), (Verdict.SIZE_MISMATCH, [small])])


@fault((8, 64))
def late_and_another_stays_away(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(LONG_RUN))
    slow, away = (int(r) for r in rng.choice(size, 2, replace=False))
    job.late_us = {slow: 900.0}
    job.programs[away] = training(LONG_RUN - 1)
    return Case(job, [(Verdict.NEVER_JOINED, [away]), (Verdict.SLOW, [slow])])


@fault((4, 8))
def nobody_can_tell(size: int, rng: np.random.Generator) -> Case:
    """The records of a busy group have overwritten a rank's records of the stuck group."""
    chatty = [0, 1]
    job = SimulatedJob(size, [[] for _ in range(size)], {"chatty": chatty, "quiet": list(range(size))})
    job.capacity = 16
    for rank in range(size):
        own = [Action("barrier", "quiet", line=20)] * 3
        if rank in chatty:
            own += [Action("all_reduce", "chatty", red="SUM", line=21)] * 20
        else:
            own += [Action("barrier", "quiet", line=22)]
        job.programs[rank] = own
    return Case(job, [(Verdict.WRAPPED, [])], as_dump=True, status=False)
