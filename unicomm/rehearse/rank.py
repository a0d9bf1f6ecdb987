"""One rank of a rehearsal: what a forked process does before, while and after it runs the program."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.config as torch_config
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from unicomm.backends import registry
from unicomm.c10d import switch
from unicomm.flight_recorder.recording import ending

from . import meeting, simulated_cuda
from .backend import RehearsalBackend
from .details import STEP, Details
from .hollow.install import install as make_ready
from .hollow.mode import HollowTensors
from .values.notes import Notes, ended
from .values.reads import Received
from .values.real import Mailbox
from .values.recorded import ReceivedValues, Recording
from .values.turns import Turn

#: Threads in which ranks compute: they are processes, and several run at once.
_THREADS = 1
READS, DETAILS, VALUES = ".reads", ".details", ".values"


@dataclass(frozen=True)
class Job:
    """What all ranks of a rehearsal have in common.

    Attributes:
        program: a file, or a function without arguments that is the program.
        arguments: of the program, as in `sys.argv`.
        nnodes, nproc_per_node: the job's shape; a rank's node is its number divided by `nproc_per_node`.
        folder: of this rehearsal: rings, notes, the ranks' output.
        records: the operations of a rank that a ring holds.
        runs: the ranks that are run.
        patience: seconds that a rank may take.
        real: whether ranks receive real values. keep: whether these are kept for a file.
        bucket_cap_mb: the size of DDP's buckets instead of the program's.
        recorded: values of an earlier rehearsal that ranks receive.
        hollow_from: the bytes from which tensors are hollow, None to compute all.
        simulated_cuda: whether the program finds GPUs that are not there.
    """

    program: str | Callable[[], object]
    arguments: Sequence[str]
    nnodes: int
    nproc_per_node: int
    folder: Path
    records: int
    runs: Sequence[int]
    patience: float
    real: bool = False
    keep: bool = False
    recorded: Recording | None = None
    bucket_cap_mb: float | None = None
    hollow_from: int | None = None
    simulated_cuda: bool = False

    @property
    def size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def rings(self) -> Path:
        return self.folder / "rings"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def output(self, rank: int) -> Path:
        return self.folder / "output" / f"rank-{rank}.log"

    def reads(self, rank: int) -> Path:
        return self.folder / "output" / f"rank-{rank}{READS}"

    def details(self, rank: int) -> Path:
        return self.folder / "output" / f"rank-{rank}{DETAILS}"

    def values(self, rank: int) -> Path:
        return self.folder / "output" / f"rank-{rank}{VALUES}"


def run_rank(job: Job, rank: int, pipe: int, from_parent: int = -1) -> NoReturn:
    """Runs the program as `rank` in this forked process, and ends it. `pipe`: to the parent."""
    code = 1
    try:
        _prepare(job, rank, pipe)
        reads = Received()

        def write() -> None:
            RehearsalBackend.details.write(job.details(rank))
            if job.keep and RehearsalBackend.received is not None:
                RehearsalBackend.received.write(job.values(rank))
            job.reads(rank).write_text(json.dumps([[*place, n] for place, n in reads.found.items()]))

        def leave() -> NoReturn:
            """Ends the rank in an operation that never completes."""
            write()
            ending.close()
            ended(job.notes, rank).touch()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

        RehearsalBackend.leave = leave
        if job.keep or job.recorded is not None:
            RehearsalBackend.received = ReceivedValues(rank, job.recorded)
        if job.real:
            turn = Turn(pipe, from_parent)
            RehearsalBackend.mail = Mailbox(job.notes, turn)
            turn.begin()
        with ExitStack() as modes:
            modes.enter_context(reads)
            for mode in _modes(job):
                modes.enter_context(mode)
            code = _run_program(job)
        write()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            ending.close()
            ended(job.notes, rank).touch()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)  # as the system does; another number would raise here


def _prepare(job: Job, rank: int, pipe: int) -> None:
    atexit._clear()  # what the parent has registered is the parent's
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _redirect(job.output(rank))
    local = job.nproc_per_node
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.size),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(job.nnodes),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(job.size),
        ROLE_NAME="default",
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="rehearsal",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        OMP_NUM_THREADS=str(_THREADS),
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="1",
        UNICOMM_BACKEND=RehearsalBackend.name,
        UNICOMM_TRACE_DIR=str(job.rings),
        UNICOMM_TRACE_KEEP="always",
        UNICOMM_TRACE_RECORDS=str(job.records),
    )
    torch.set_num_threads(_THREADS)
    # torch says for each group that the switch is on.
    logging.getLogger("torch.distributed.distributed_c10d").addFilter(
        lambda record: not record.getMessage().startswith("Using TorchComms")
    )
    RehearsalBackend.notes = Notes(job.notes, rank, job.runs, job.patience, pipe)
    details = RehearsalBackend.details = Details()
    register_optimizer_step_post_hook(lambda *_: details.add_events([STEP], time.process_time_ns()))
    registry.stand_in(RehearsalBackend)
    torch_config.use_torchcomms = True  # torch has read its variable at its import
    if reason := switch.install():
        raise RuntimeError(f"torch.distributed cannot be rehearsed: {reason}")
    if job.bucket_cap_mb is not None:
        _set_buckets(job.bucket_cap_mb)
    meeting.install(own_objects=not job.real, details=details)
    if job.hollow_from is not None:
        make_ready(job.hollow_from)
    if job.simulated_cuda:
        simulated_cuda.install(job.nproc_per_node)
    _set_modes_of_threads(job)
    ending.begin(job.rings, rank)


def _modes(job: Job) -> list[AbstractContextManager[object]]:
    """Returns new modes of torch, which a thread of the program has to enter."""
    modes: list[AbstractContextManager[object]] = []
    if job.simulated_cuda:
        modes.append(simulated_cuda.SimulatedCuda())
    if job.hollow_from is not None:
        modes.append(HollowTensors())
    return modes


def _set_modes_of_threads(job: Job) -> None:
    """Has threads that the program starts enter the modes, too."""
    before = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with ExitStack() as modes:
            for mode in _modes(job):
                modes.enter_context(mode)
            before(self)

    threading.Thread.run = run  # type: ignore[method-assign]


def _set_buckets(megabytes: float) -> None:
    """Makes every `DistributedDataParallel` of this process with buckets of this size."""
    before = DistributedDataParallel.__init__
    named = inspect.signature(before)

    @functools.wraps(before)
    def init(*args: Any, **options: Any) -> None:
        given = named.bind(*args, **options)
        given.arguments["bucket_cap_mb"] = megabytes
        before(*given.args, **given.kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _redirect(path: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    # A test runner may have put objects of its own in their place.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run_program(job: Job) -> int:
    """Returns the exit code. An exception is noted beside the ring, as in a real run."""
    try:
        if callable(job.program):
            job.program()
        else:
            sys.argv = [job.program, *job.arguments]
            sys.path.insert(0, str(Path(job.program).resolve().parent))
            runpy.run_path(job.program, run_name="__main__")
    except SystemExit as end:
        return 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
