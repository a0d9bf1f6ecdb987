"""Fault kinds with ranks that do not join, and with dead or stopped processes."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import LARGE, STEPS, Case, alive_until, fault, find, job_of, mesh, pick, training
from .simulated_job import Action, SimulatedJob


@fault((2, 8, 256, 16384))
def leaves_out_a_collective(size: int, rng: np.random.Generator) -> Case:
    """All collectives are equal, so the missing one shows only at the end."""
    job = job_of(size, [Action("all_reduce", numel=1024, red="SUM", line=20)] * (8 if size > 1000 else 20))
    bad = pick(rng, size)
    job.replace_call(bad, 5)
    return Case(job, [(Verdict.NEVER_JOINED, [bad])])


@fault()
def stops_early(size: int, rng: np.random.Generator) -> Case:
    """Fewer batches on some ranks."""
    job = job_of(size)
    bad = sorted({pick(rng, size - 1), size - 1})[: max(1, size // 3)]
    for rank in bad:
        job.programs[rank] = training(STEPS - 1)
    return Case(job, [(Verdict.NEVER_JOINED, bad)])


@fault(LARGE)
def never_joins_in_a_mesh(size: int, rng: np.random.Generator) -> Case:
    """One rank does not join its tensor parallel group; the data parallel groups wait for its victims."""
    job, _ = mesh(size)
    bad = pick(rng, size)
    at = find(job.programs[bad], "all_reduce", 5)
    job.programs[bad] = list(job.programs[bad])[:at]
    return Case(job, [(Verdict.NEVER_JOINED, [bad])])


@fault(dumps=False)
def never_joins_and_left_no_ring(size: int, rng: np.random.Generator) -> Case:
    """Other ranks of its host left theirs."""
    job = job_of(size)
    bad = pick(rng, size)
    job.programs[bad] = training(3)
    return Case(job, [(Verdict.NEVER_JOINED, [bad])], without=[bad])


@fault()
def never_joins_with_another_dump_missing(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    bad, lost = (int(r) for r in rng.choice(size, 2, replace=False))
    job.programs[bad] = training(STEPS - 2)
    return Case(job, [(Verdict.NEVER_JOINED, [bad])], without=[lost])


@fault()
def never_joins_after_the_ring_wrapped(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    job.capacity = 16
    bad = pick(rng, size)
    job.programs[bad] = training(STEPS - 1)
    return Case(job, [(Verdict.NEVER_JOINED, [bad])])


@fault()
def never_joins_with_skewed_clocks(size: int, rng: np.random.Generator) -> Case:
    case = stops_early(size, rng)
    case.job.skew_ns = {r: int(rng.integers(-9_000_000_000, 9_000_000_000)) for r in range(size)}
    return case


@fault(dumps=False)
def timeout_after_one_stayed_away(size: int, rng: np.random.Generator) -> Case:
    """The other ranks fail with a timeout; all processes have ended."""
    case = stops_early(size, rng)
    case.job.errors = "timeout"
    return case


@fault((2, 4, 8, 64), dumps=False)
def blocked_in_the_program(size: int, rng: np.random.Generator) -> Case:
    """The process runs, without an unfinished operation: it loads, saves or waits for a lock."""
    return alive_until(job_of(size), rng, Verdict.BLOCKED_OUTSIDE, 17, "leave")


@fault(LARGE, dumps=False)
def blocked_in_a_mesh(size: int, rng: np.random.Generator) -> Case:
    return alive_until(mesh(size)[0], rng, Verdict.BLOCKED_OUTSIDE, 10, "leave")


@fault((4, 16, 64), dumps=False)
def blocked_host(size: int, rng: np.random.Generator) -> Case:
    """All ranks of one host are blocked."""
    job = job_of(size)
    job.live, job.hosts = True, max(1, size // 4)
    host = pick(rng, 4)
    bad = list(range(host * job.hosts, (host + 1) * job.hosts))
    for rank in bad:
        job.replace_call(rank, 21, Action("leave"))
    return Case(job, [(Verdict.BLOCKED_OUTSIDE, bad)])


@fault((2, 4, 64), dumps=False)
def killed_between_operations(size: int, rng: np.random.Generator) -> Case:
    return alive_until(job_of(size), rng, Verdict.PROCESS_DEAD, 9, "die")


@fault((2, 4, 64, 4096), dumps=False)
def killed_inside_an_operation(size: int, rng: np.random.Generator) -> Case:
    return alive_until(job_of(size, training(4)), rng, Verdict.PROCESS_DEAD, 9, fate="die")


@fault(dumps=False)
def killed_and_lost_by_the_others(size: int, rng: np.random.Generator) -> Case:
    case = killed_inside_an_operation(size, rng)
    case.job.errors = "peer lost"
    return case


@fault()
def dump_not_read(size: int, rng: np.random.Generator) -> Case:
    """The ranks wait for one without a dump, which may be healthy, late or dead."""
    job = job_of(size)
    away = pick(rng, size)
    job.programs[away] = training(3)
    return Case(job, [(Verdict.NOT_READ, [])], without=[away], as_dump=True)


def on_hosts(size: int, rng: np.random.Generator) -> tuple[SimulatedJob, list[int], list[int]]:
    """Returns a job on two hosts, and the ranks of each host in random order."""
    job = job_of(size)
    job.hosts = size // 2
    order = [0, 1] if rng.random() < 0.5 else [1, 0]
    here, there = (list(range(h * job.hosts, (h + 1) * job.hosts)) for h in order)
    return job, here, there


@fault(dumps=False)
def host_not_read_and_lost(size: int, rng: np.random.Generator) -> Case:
    """A rank of the other host died, its launcher ended the host's other ranks, and nobody read it."""
    job, _, there = on_hosts(size, rng)
    for rank in there:
        job.replace_call(rank, 9, Action("die"))
    job.errors = "peer lost"
    return Case(job, [(Verdict.NOT_READ, [])], without=there)


@fault(dumps=False)
def host_not_read_and_running(size: int, rng: np.random.Generator) -> Case:
    """A rank of the other host does not go on; the ranks of both hosts run."""
    job, _, there = on_hosts(size, rng)
    job.live = True
    job.replace_call(there[0], 9, Action("leave"))
    return Case(job, [(Verdict.NOT_READ, [])], without=there)


@fault(dumps=False)
def stays_away_beside_a_host_not_read(size: int, rng: np.random.Generator) -> Case:
    """The culprit is on the host that was read: the ranks of the other host are not suspected."""
    job, here, there = on_hosts(size, rng)
    job.live = True
    job.replace_call(here[0], 9, Action("leave"))
    return Case(job, [(Verdict.BLOCKED_OUTSIDE, [here[0]])], without=there)


@fault(dumps=False)
def message_from_a_host_not_read(size: int, rng: np.random.Generator) -> Case:
    job, here, there = on_hosts(size, rng)
    job.replace_call(here[0], 20, Action("recv", peer=there[0], line=69), job.programs[here[0]][20])
    job.replace_call(there[0], 20)
    return Case(job, [(Verdict.NOT_READ, [])], without=there)


@fault(dumps=False)
def killed_without_a_trace(size: int, rng: np.random.Generator) -> Case:
    """The other ranks report that they lost it, and it left no file."""
    case = killed_and_lost_by_the_others(size, rng)
    case.without = list(case.expected[0][1])
    return case


@fault(dumps=False)
def ended_by_itself(size: int, rng: np.random.Generator) -> Case:
    """One rank ends with an exception or exit; the others still wait."""
    return alive_until(job_of(size), rng, Verdict.PROCESS_DEAD, 14, "end")


@fault((2, 4, 64), dumps=False)
def stopped_between_operations(size: int, rng: np.random.Generator) -> Case:
    return alive_until(job_of(size), rng, Verdict.PROCESS_STOPPED, 9, "stop")


@fault(LARGE, dumps=False)
def stopped_inside_an_operation_of_a_mesh(size: int, rng: np.random.Generator) -> Case:
    return alive_until(mesh(size)[0], rng, Verdict.PROCESS_STOPPED, 10, fate="stop")
