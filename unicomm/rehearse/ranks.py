"""The parent process of a rehearsal: starts a process for each rank, and notes how it ended."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from unicomm.flight_recorder.ring.endings import signal_name

from .hash_seeds import Waiting, spawn
from .rank import Job, run_rank
from .values.notes import GO_ON, ended, given_up
from .values.turns import run_in_turns

_LOOK = 0.2  # seconds between two looks at the deadlines of ranks
_STILL = 1.0  # seconds in which ranks that all wait may still find what they wait for
_MOST_WAITING = 64  # ranks that wait for objects of ranks that have not been started

#: Called with the number of ranks that are over.
Progress = Callable[[int], None]


def run_ranks(
    job: Job,
    ranks: Sequence[int],
    jobs: int,
    progress: Progress = lambda _: None,
    other_seeds: Sequence[int] = (),
) -> dict[int, str]:
    """Runs the program as each of `ranks`, `jobs` at a time. `other_seeds`: those with another hash seed.

    Returns why ranks ended that did not end by themselves.

    The first rank runs alone: most broadcasts come from it, and the others get what it has sent.
    """
    for folder in (job.rings, job.notes, job.folder / "output"):
        folder.mkdir(mode=0o700, exist_ok=True)
    spawned = spawn(job, other_seeds)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    pool = _Pool(job, ranks, spawned)
    over = 0
    try:
        if job.real:
            fork = partial(_fork_with_turn, job, spawned)
            return run_in_turns(ranks, fork, job.patience, jobs, progress)
        while pool.waiting or pool.running:
            pool.start(jobs if over else 1)
            over += pool.look()
            progress(over)
    finally:
        pool.kill()
        for one in spawned.values():
            one.end()
        gc.unfreeze()
    return pool.ends


@dataclass
class _Running:
    """A rank that runs. `wants`: the rank for whose object it waits, or `GO_ON`."""

    pid: int
    rank: int
    until: float
    wants: int = GO_ON


class _Pool:
    """The ranks that run, by the pipe that each holds open."""

    def __init__(self, job: Job, ranks: Sequence[int], spawned: dict[int, Waiting]) -> None:
        self._job, self._spawned = job, spawned
        self.waiting = dict.fromkeys(ranks)
        self.running: dict[int, _Running] = {}
        self.ends: dict[int, str] = {}
        self._still = 0.0  # since when all ranks wait for others

    def start(self, most: int) -> None:
        """Starts ranks, of which `most` may compute at a time; first those for which others wait."""
        while self.waiting:
            computing = sum(one.wants == GO_ON for one in self.running.values())
            if computing >= most:
                return
            wanted = [one.wants for one in self.running.values() if one.wants in self.waiting]
            if len(self.running) >= most + _MOST_WAITING and not wanted:
                self._give_up()
                return
            rank = wanted[-1] if wanted else next(iter(self.waiting))
            del self.waiting[rank]
            ready = self._spawned.pop(rank, None)
            descriptor, pid = _fork(self._job, rank) if ready is None else ready.go()
            self.running[descriptor] = _Running(pid, rank, time.monotonic() + self._job.patience)
        if self.running and all(one.wants != GO_ON for one in self.running.values()):
            self._still = self._still or time.monotonic()
            if time.monotonic() - self._still > _STILL:
                self._give_up()
                self._still = 0.0
        else:
            self._still = 0.0

    def _give_up(self) -> None:
        """Has the rank that waits for longest go on without the object."""
        first = next((one for one in self.running.values() if one.wants != GO_ON), None)
        if first is not None:
            given_up(self._job.notes, first.rank).touch()

    def look(self) -> int:
        """Waits until a rank says something, or a moment. Returns how many have ended."""
        count = 0
        ready = select.select(list(self.running), [], [], _LOOK)[0]
        now = time.monotonic()
        for descriptor, one in list(self.running.items()):
            why = ""
            if descriptor in ready:
                if message := os.read(descriptor, 1 << 16):
                    one.wants = int(message.split()[-1])
                    continue
            elif now > one.until:
                os.kill(one.pid, signal.SIGKILL)
                why = "did not end in time"
            else:
                continue
            status = os.waitpid(one.pid, 0)[1]
            os.close(descriptor)
            del self.running[descriptor]
            ended(self._job.notes, one.rank).touch()
            count += 1
            if why or os.WIFSIGNALED(status):
                self.ends[one.rank] = why or f"was ended by {signal_name(-os.WTERMSIG(status))}"
        return count

    def kill(self) -> None:
        """Ends the ranks that still run."""
        for descriptor, one in self.running.items():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            os.close(descriptor)
        self.running.clear()


def _fork_with_turn(job: Job, spawned: dict[int, Waiting], rank: int) -> tuple[int, int, int]:
    """Returns a pipe from the process that ends with it, a pipe to it, and the process."""
    if (ready := spawned.pop(rank, None)) is not None:
        return ready.out, ready.into, ready.pid
    theirs, ours = os.pipe()
    out, pid = _fork(job, rank, theirs, ours)
    os.close(theirs)
    return out, ours, pid


def _fork(job: Job, rank: int, from_parent: int = -1, to_rank: int = -1) -> tuple[int, int]:
    """Returns a pipe from the process that ends with it, and the process."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that a test runner has
        pid = os.fork()
    if pid == 0:
        os.close(ours)
        if to_rank >= 0:
            os.close(to_rank)
        run_rank(job, rank, theirs, from_parent)
    os.close(theirs)
    return ours, pid
