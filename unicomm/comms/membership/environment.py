"""This process's place in its job: rank and size, from the environment variables of the launcher.

`detect_environment` goes through `LAUNCHERS` from top to bottom and takes the first row whose variables are
set. Variables that a person sets come before those of a launcher, and the inner of two launchers before the
outer one: torchrun under srun is torchrun. job_store.py opens the store in which the ranks meet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unicomm.comms.errors import InvalidArgumentError

METHOD = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD"


@dataclass(frozen=True)
class Environment:
    """This process's place in its job.

    Attributes:
        rank, size: its number, and how many processes there are.
        local_rank, local_size: the same within its host; None where the launcher does not tell.
        source: who told, such as "torchrun" or "Open MPI", or "single process".
        job: the launcher's name for the job and the attempt, the same on all ranks; "" if it has none.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str
    job: str


@dataclass(frozen=True)
class Launcher:
    """A row of `LAUNCHERS`: the variables by which a launcher tells a process its place.

    Of several variables the first that is set counts. `applies` says whether the launcher is used at all.
    `strict`: variables that are set in part are an error at once, and no later row is tried. `hosts`: the
    processes of the job on one host have the launcher's daemon as common ancestor.
    """

    name: str
    methods: tuple[str, ...]
    rank: str
    sizes: tuple[str, ...]
    local_ranks: tuple[str, ...] = ()
    local_sizes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    applies: Callable[[Mapping[str, str]], bool] = lambda environ: True
    count_local: Callable[[Mapping[str, str]], int | None] = lambda environ: None
    strict: bool = False
    hosts: bool = True


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    # A batch script has SLURM_PROCID=0 and the job's number of tasks, although it is a single process. Only
    # srun makes numbered steps; the highest numbers stand for batch scripts and interactive shells.
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < 0xFFFFFFF0


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """This host's entry in SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3" for hosts with 4, 4 and 3 tasks."""
    node = environ.get("SLURM_NODEID", "")
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


TORCHCOMM = Launcher("TORCHCOMM_RANK", (), "TORCHCOMM_RANK", ("TORCHCOMM_SIZE",), strict=True, hosts=False)
TORCHRUN = Launcher(
    "torchrun",
    ("torchrun",),
    "RANK",
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    applies=lambda environ: "TORCHELASTIC_RUN_ID" in environ,
    strict=True,
)
LAUNCHERS = (
    TORCHCOMM,
    TORCHRUN,
    Launcher(
        "Open MPI",
        ("mpi", "openmpi"),
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "PMI",
        ("mpi", "pmi"),
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PALS_APID",),
    ),
    Launcher("PMIx", ("mpi", "pmix"), "PMIX_RANK", ("PMIX_SIZE",), jobs=("PMIX_NAMESPACE",)),
    Launcher(
        "PALS",
        ("pals",),
        "PALS_RANKID",
        ("PALS_SIZE", "PALS_NRANKS", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID",),
        ("PALS_LOCAL_SIZE",),
        ("PALS_APID",),
    ),
    Launcher(
        "Slurm",
        ("slurm",),
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        jobs=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        applies=_in_srun_step,
        count_local=_slurm_local_size,
    ),
    Launcher(
        "RANK/WORLD_SIZE",
        ("torchrun", "env"),
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        hosts=False,
    ),
)


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Reads this process's place from the variables of the launcher; size 1 without a launcher.

    TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD limits the search to one kind of launcher: torchrun, mpi (or
    openmpi, pmi, pmix), pals, slurm, env, or auto. TORCHCOMM_RANK and TORCHCOMM_SIZE always count.

    Raises `InvalidArgumentError`, which names the variables, if they are incomplete or unreadable, contradict
    each other, or are not set although the method asks for them.
    """
    method = environ.get(METHOD, "").lower() or "auto"
    place: Environment | None = None
    half: _HalfSetError | None = None
    for row in LAUNCHERS:
        if not row.applies(environ) or (method != "auto" and row.methods and method not in row.methods):
            continue
        try:
            told = _read(row, environ)
        except InvalidArgumentError as error:
            if place is None and (row.strict or not isinstance(error, _HalfSetError)):
                raise
            half = half or (error if isinstance(error, _HalfSetError) else None)
            continue
        if place is None or told is None:
            place = place or told
        elif place.local_size is None and (told.rank, told.size) == (place.rank, place.size):
            # srun --mpi=pmi2 sets PMI's variables, but only Slurm's tell the place within the host.
            place = replace(place, local_rank=told.local_rank, local_size=told.local_size)
    if place is not None:
        return place
    if half is not None:
        raise half
    if method == "auto":
        return Environment(0, 1, None, None, "single process", "")
    known = sorted({name for row in LAUNCHERS for name in row.methods})
    if method not in known:
        raise InvalidArgumentError(f"{METHOD}={method} is unknown", hint=f"one of auto, {', '.join(known)}")
    raise InvalidArgumentError(
        f"{METHOD}={method}, but the variables of that launcher are not set",
        hint=f"start the program with that launcher, or unset {METHOD}",
    )


class _HalfSetError(InvalidArgumentError):
    """One of two variables is missing; another launcher may have set all of its own."""


def _read(row: Launcher, environ: Mapping[str, str]) -> Environment | None:
    def number(names: Sequence[str]) -> int | None:
        name = next((name for name in names if environ.get(name)), None)
        if name is None:
            return None
        if not re.fullmatch(r"-?\d+", environ[name].strip()):
            raise InvalidArgumentError(
                f"{name}={environ[name]!r} is not a number", hint=f"set a number, or unset it ({row.name})"
            )
        return int(environ[name])

    rank, size = number([row.rank]), number(row.sizes)
    if rank is None and not environ.get(row.sizes[0]):
        return None
    if rank is None or size is None:
        there, missing = (row.rank, " or ".join(row.sizes)) if size is None else (row.sizes[0], row.rank)
        raise _HalfSetError(
            f"{there} is set, but {missing} is not",
            hint=f"set both or none of them; {TORCHCOMM.rank} and {TORCHCOMM.sizes[0]} override all others",
        )
    local_rank, local_size = number(row.local_ranks), number(row.local_sizes)
    local_size = row.count_local(environ) if local_size is None else local_size
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{row.rank}={rank} is not in range [0, {size}), the size that {' or '.join(row.sizes)} says",
            hint="ranks count from 0; see what else sets these variables",
        )
    if local_size is not None and not (local_rank or 0) < local_size <= size:
        raise InvalidArgumentError(
            f"local rank {local_rank} of {local_size} does not fit {size} ranks",
            hint=f"see what sets {', '.join(row.local_ranks + row.local_sizes)}",
        )
    job = "/".join(environ[name] for name in row.jobs if environ.get(name))
    return Environment(rank, size, local_rank, local_size, row.name, job)
