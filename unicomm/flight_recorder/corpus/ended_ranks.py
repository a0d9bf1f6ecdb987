"""Fault kinds of ranks whose process ended, with the files that tell how, or that hang at a known place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from unicomm.flight_recorder.analysis.verdict import Verdict

from .fault_kinds import LARGE, Case, alive_until, fault, job_of, mesh, pick, training
from .simulated_job import SimulatedJob

_USER = {"file": "/job/data.py", "line": 88, "function": "load_batch"}
_LIBRARY = {"file": "/env/lib/python3.11/site-packages/numpy/core.py", "line": 7, "function": "stack"}
_MAIN = {"file": "/job/train.py", "line": 30, "function": "<module>"}
_STACKS = """Process state: sleeping
Current thread 0x00007f0000000000 (most recent call first):
  File "/job/data.py", line 88 in load_batch
  File "/job/train.py", line 30 in <module>
"""


def _ending(job: SimulatedJob, rank: int, **facts: Any) -> None:
    """Gives a rank an ending file."""
    own = {"format": 1, "rank": rank, "pid": 10000 + rank, "host": f"node{rank // job.hosts}"}
    job.endings[f"rank{rank}.ending"] = json.dumps(own | facts)


def _exit(job: SimulatedJob, rank: int, code: int, out_of_memory: str = "") -> None:
    """Gives a rank the exit code that a launcher saw."""
    ranks = {
        rank: {"pid": 10000 + rank, "exit_code": code, "out_of_memory": out_of_memory, "ended_ns": 10**18}
    }
    job.endings[f"launcher{rank}.exits"] = json.dumps({"format": 1, "host": "node0", "ranks": ranks})


def _raised(kind: str, message: str, consequence: bool = False) -> dict[str, Any]:
    raised = {
        "type": kind,
        "message": message,
        "frames": [_LIBRARY, _USER, _MAIN],
        "consequence": consequence,
    }
    return {"ended_ns": 10**18, "raised": raised}


def _gone(size: int, rng: np.random.Generator, verdict: Verdict, fate: str) -> tuple[Case, int]:
    """Returns a case in which a rank has ended while the others wait, and the rank."""
    case = alive_until(job_of(size, training(4)), rng, verdict, 9, fate)
    return case, case.expected[0][1][0]


def _raised_by_one(size: int, rng: np.random.Generator) -> tuple[Case, set[int]]:
    """Returns a case in which a rank raises, and others that report that they lost it."""
    case, bad = _gone(size, rng, Verdict.EXCEPTION, "end")
    case.job.errors = "peer lost"
    _ending(case.job, bad, **_raised("ValueError", "bad batch 7"))
    others = set(range(min(size, 8))) - {bad}
    for rank in others:
        _ending(case.job, rank, **_raised("PeerLostError", "rank 1 has left", consequence=True))
    return case, others


@fault((2, 4, 64, 1024), dumps=False)
def raises(size: int, rng: np.random.Generator) -> Case:
    """The others report that they lost it, and raise for that reason."""
    return _raised_by_one(size, rng)[0]


@fault((2, 4, 64), dumps=False)
def others_abort(size: int, rng: np.random.Generator) -> Case:
    """The others end by SIGABRT because of their error, as `abort_process_on_timeout_or_error` says."""
    case, others = _raised_by_one(size, rng)
    for rank in others:
        _exit(case.job, rank, -6)
    return case


@fault(LARGE, dumps=False)
def raises_in_a_mesh(size: int, rng: np.random.Generator) -> Case:
    case = alive_until(mesh(size)[0], rng, Verdict.EXCEPTION, 10, "end")
    _ending(case.job, case.expected[0][1][0], **_raised("KeyError", "'x'"))
    return case


@fault(dumps=False)
def raises_on_all_ranks(size: int, rng: np.random.Generator) -> Case:
    """All ranks raise the same. One of them came late, which is not the cause."""
    job = job_of(size, training(4))
    for rank in range(size):
        _ending(job, rank, **_raised("ValueError", "bad batch 7"))
    return Case(job, [(Verdict.EXCEPTION, list(range(size)))])


@fault(dumps=False)
def raises_before_its_first_communicator(size: int, rng: np.random.Generator) -> Case:
    """It has no ring, and the other ranks have waited in vain for it to join."""
    job = job_of(size, [])
    bad = pick(rng, size)
    _ending(job, bad, **_raised("ImportError", "no module named x"))
    return Case(job, [(Verdict.EXCEPTION, [bad])], without=[bad])


@fault(dumps=False)
def calls_exit(size: int, rng: np.random.Generator) -> Case:
    case, bad = _gone(size, rng, Verdict.EXITED, "end")
    _ending(case.job, bad, ended_ns=10**18, exit_call=[_USER, _MAIN], exit_argument=3)
    return case


@fault(dumps=False)
def exits_without_a_word(size: int, rng: np.random.Generator) -> Case:
    """os._exit: only the launcher knows."""
    case, bad = _gone(size, rng, Verdict.EXITED, "die")
    _ending(case.job, bad)
    _exit(case.job, bad, 5)
    return case


@fault(dumps=False)
def crashes(size: int, rng: np.random.Generator) -> Case:
    case, bad = _gone(size, rng, Verdict.CRASHED, "die")
    _ending(case.job, bad)
    case.job.endings[f"rank{bad}.stacks"] = "Fatal Python error: Segmentation fault\n\n" + _STACKS
    return case


@fault(dumps=False)
def aborts_under_a_launcher(size: int, rng: np.random.Generator) -> Case:
    """The program has its own handlers for crashes: only the launcher knows."""
    case, bad = _gone(size, rng, Verdict.CRASHED, "die")
    _ending(case.job, bad)
    _exit(case.job, bad, -6)
    return case


@fault(dumps=False)
def runs_out_of_memory(size: int, rng: np.random.Generator) -> Case:
    case, bad = _gone(size, rng, Verdict.OUT_OF_MEMORY, "die")
    _ending(case.job, bad)
    _exit(case.job, bad, -9, f"the kernel's log: it killed process {10000 + bad}, because memory ran out")
    return case


@fault(dumps=False)
def is_killed_under_a_launcher(size: int, rng: np.random.Generator) -> Case:
    """SIGKILL without evidence for a want of memory."""
    case, bad = _gone(size, rng, Verdict.PROCESS_DEAD, "die")
    _ending(case.job, bad)
    _exit(case.job, bad, -9)
    return case


@fault(dumps=False)
def is_terminated(size: int, rng: np.random.Generator) -> Case:
    case, bad = _gone(size, rng, Verdict.TERMINATED, "die")
    _ending(case.job, bad)
    _exit(case.job, bad, -15)
    return case


@fault(dumps=False)
def hangs_at_a_known_place(size: int, rng: np.random.Generator) -> Case:
    case, bad = _gone(size, rng, Verdict.BLOCKED_OUTSIDE, "leave")
    _ending(case.job, bad)
    case.job.endings[f"rank{bad}.stacks"] = _STACKS
    return case
