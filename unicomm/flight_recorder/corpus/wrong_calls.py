"""Fault kinds with collectives whose calls differ."""

from __future__ import annotations

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import SMALL, STEPS, Case, fault, find, job_of, mesh, pick, training, wrong_call
from .simulated_job import Action, SimulatedJob


@fault((3, 8, 256, 16384))
def wrong_operation(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(3 if size > 1000 else STEPS))
    other = {"op": "reduce_scatter_single", "red": "SUM", "line": 90}
    return wrong_call(job, rng, Verdict.WRONG_OPERATION, "all_gather_single", 1, **other)


@fault(SMALL)
def wrong_operation_on_rank_0(size: int, rng: np.random.Generator) -> Case:
    """The culprit's file is read first."""
    job = job_of(size)
    job.change(0, 13, op="barrier", line=91)
    return Case(job, [(Verdict.WRONG_OPERATION, [0])])


@fault((2,))
def wrong_operation_of_two(size: int, rng: np.random.Generator) -> Case:
    """There is no majority: the earlier calls decide."""
    job = job_of(size)
    bad = pick(rng, size)
    job.change(bad, 16, op="barrier", line=92)
    return Case(job, [(Verdict.WRONG_OPERATION, [bad])])


@fault()
def leaves_out_one_of_several(size: int, rng: np.random.Generator) -> Case:
    """The rank continues with the next operation, so that its numbers no longer match."""
    job = job_of(size)
    bad = pick(rng, size)
    job.replace_call(bad, find(job.programs[bad], "all_gather_single", 4))
    return Case(job, [(Verdict.WRONG_OPERATION, [bad])])


@fault((4, 64))
def wrong_operation_in_a_mesh(size: int, rng: np.random.Generator) -> Case:
    """Groups of two have no majority; similar groups decide."""
    other = {"op": "all_reduce", "line": 93}
    return wrong_call(mesh(size)[0], rng, Verdict.WRONG_OPERATION, "reduce_scatter_single", 3, **other)


@fault((3, 8, 1024))
def size_mismatch(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size, training(4 if size > 1000 else STEPS))
    return wrong_call(job, rng, Verdict.SIZE_MISMATCH, "all_reduce", 5, numel=500)


@fault((2,))
def size_mismatch_of_two(size: int, rng: np.random.Generator) -> Case:
    return wrong_call(job_of(size), rng, Verdict.SIZE_MISMATCH, "all_reduce", 7, numel=500)


@fault(SMALL)
def size_mismatch_that_completes(size: int, rng: np.random.Generator) -> Case:
    """Silent corruption: nothing hangs."""
    return wrong_call(job_of(size), rng, Verdict.SIZE_MISMATCH, "all_reduce", 5, numel=500, loose=True)


@fault(SMALL)
def dtype_mismatch(size: int, rng: np.random.Generator) -> Case:
    return wrong_call(job_of(size), rng, Verdict.DTYPE_MISMATCH, "all_gather_single", 5, dtype="bfloat16")


@fault(SMALL)
def dtype_mismatch_in_each_step(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    bad = pick(rng, size)
    for nth in range(STEPS):
        at = find(job.programs[bad], "all_gather_single", nth)
        job.change(bad, at, dtype="float16", loose=True)
    return Case(job, [(Verdict.DTYPE_MISMATCH, [bad])])


@fault(dumps=False)
def root_mismatch(size: int, rng: np.random.Generator) -> Case:
    return wrong_call(job_of(size), rng, Verdict.ROOT_MISMATCH, "broadcast", 5, root=1)


@fault(SMALL, dumps=False)
def root_is_each_ones_own_rank(size: int, rng: np.random.Generator) -> Case:
    """Two of the ranks pass a wrong root, and each another one."""
    job = job_of(max(size, 5))
    for rank in (1, 2):
        job.change(rank, find(job.programs[rank], "broadcast", 5), root=rank)
    return Case(job, [(Verdict.ROOT_MISMATCH, [1, 2])])


@fault(dumps=False)
def reduction_mismatch(size: int, rng: np.random.Generator) -> Case:
    return wrong_call(job_of(size), rng, Verdict.REDUCTION_MISMATCH, "all_reduce", 5, red="AVG", loose=True)


@fault()
def split_mismatch(size: int, rng: np.random.Generator) -> Case:
    """One rank once sends parts of other sizes than the others expect."""
    step = Action("all_to_all_v_single", numel=100 * size, line=82)
    job = SimulatedJob(size, [[step] * STEPS for _ in range(size)])
    bad = pick(rng, size)
    job.change(bad, 7, numel=100 * size + 40, out_numel=100 * size)
    return Case(job, [(Verdict.SPLIT_MISMATCH, [bad])])


@fault()
def split_mismatch_in_a_gather(size: int, rng: np.random.Generator) -> Case:
    sizes = [10 + r for r in range(size)]
    programs = [[Action("all_gather_v", numel=s, out_numel=sum(sizes), line=83)] * STEPS for s in sizes]
    job = SimulatedJob(size, list(programs))
    bad = pick(rng, size)
    job.change(bad, 8, numel=sizes[bad] + 100)
    return Case(job, [(Verdict.SPLIT_MISMATCH, [bad])])


@fault()
def order_swap(size: int, rng: np.random.Generator) -> Case:
    """The operations are issued without waiting, so both are recorded."""
    step = [
        Action("all_reduce", numel=4096, red="SUM", line=20, waits=False),
        Action("all_reduce", numel=512, red="SUM", line=21, waits=False),
        Action("all_gather_single", numel=64, line=24, waits=False),
        Action("sync"),
    ]
    job = SimulatedJob(size, [step * STEPS] * size)
    bad = pick(rng, size)
    a, b = job.programs[bad][21], job.programs[bad][22]
    job.change(bad, 21, op=b.op, numel=b.numel, red=b.red, line=b.line)
    job.change(bad, 22, op=a.op, numel=a.numel, red=a.red, line=a.line)
    return Case(job, [(Verdict.ORDER_SWAP, [bad])])


@fault(SMALL)
def order_swap_that_completes(size: int, rng: np.random.Generator) -> Case:
    job = job_of(size)
    bad = pick(rng, size)
    at = find(job.programs[bad], "all_reduce", 6)
    a, b = job.programs[bad][at], job.programs[bad][at + 1]
    job.change(bad, at, numel=b.numel, line=b.line, loose=True)
    job.change(bad, at + 1, numel=a.numel, line=a.line, loose=True)
    return Case(job, [(Verdict.ORDER_SWAP, [bad])])
