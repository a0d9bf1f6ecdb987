"""The parent of a rehearsal's ranks: imports once what the program imports, and forks each rank."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import select
import signal
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .rank import Job, run_rank
from .values.notes import GO_ON, ended, given_up
from .values.turns import run_in_turns

_LOOK = 0.2  # seconds between two looks at the deadlines of ranks
_STILL = 1.0  # seconds in which ranks that all wait may still find what they wait for
_MOST_WAITING = 64  # ranks that wait for objects of ranks that have not been started

#: Modules that almost every rank imports while it runs, often at its first use of an optimizer.
_SHARED = (
    *("torch.optim", "torch._dynamo", "torch.nn.parallel", "torch.distributed.device_mesh"),
    *("unicomm.c10d.process_group", "unicomm.c10d.torchcomms_import", "unicomm.c10d.store_deadline"),
    *("unicomm.c10d.subgroups", "unicomm.c10d.env_rendezvous", "unicomm.flight_recorder.recording.hook"),
)

#: Called with the number of ranks that are over.
Progress = Callable[[int], None]


def import_shared() -> None:
    """Imports what the ranks of every program need."""
    for name in _SHARED:
        importlib.import_module(name)


def import_for(program: Path) -> None:
    """Imports the installed modules that a program imports at its top, so that its ranks share them.

    Modules of the program itself are left to the ranks: they may ask for their rank when they are imported.
    A module that cannot be imported is left to the ranks, too, which then say why.
    """
    try:
        tree = ast.parse(program.read_text())
    except (SyntaxError, ValueError):  # the ranks say so
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in filter(_is_installed, names):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _is_installed(name: str) -> bool:
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    origin = "" if spec is None else spec.origin or ""
    return origin in ("built-in", "frozen") or any(origin.startswith(place + os.sep) for place in places)


def run_ranks(
    job: Job, ranks: Sequence[int], jobs: int, progress: Progress = lambda _: None
) -> dict[int, str]:
    """Runs the program as each of `ranks`, `jobs` at a time.

    Returns why ranks ended that did not end by themselves.

    The first rank runs alone: most broadcasts come from it, and the others get what it has sent.
    """
    for folder in (job.rings, job.notes, job.folder / "output"):
        folder.mkdir(mode=0o700, exist_ok=True)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared
    if job.real:
        try:
            return run_in_turns(ranks, partial(_fork_with_turn, job), job.patience, jobs, progress)
        finally:
            gc.unfreeze()
    pool = _Pool(job, ranks)
    over = 0
    try:
        while pool.waiting or pool.running:
            pool.start(jobs if over else 1)
            over += pool.look()
            progress(over)
    finally:
        pool.kill()
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

    def __init__(self, job: Job, ranks: Sequence[int]) -> None:
        self._job = job
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
            descriptor, pid = _fork(self._job, rank)
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
                self.ends[one.rank] = why or f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return count

    def kill(self) -> None:
        """Ends the ranks that still run."""
        for descriptor, one in self.running.items():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)
            os.close(descriptor)
        self.running.clear()


def _fork_with_turn(job: Job, rank: int) -> tuple[int, int, int]:
    """Returns a pipe from the process that ends with it, a pipe to it, and the process."""
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
