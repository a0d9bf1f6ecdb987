"""Who am I, and where do I meet the others: what the launcher says in environment variables.

`detect_environment` goes through `LAUNCHERS` from top to bottom; the first row whose variables are there
wins. The order puts what a person sets before what a launcher sets, and the inner of two launchers before the
outer one: torchrun under srun is torchrun. `open_store` makes the store that `store=` would otherwise give.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from .errors import BackendError, CommTimeoutError, InvalidArgumentError

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

    Where several variables are named, the first that is set counts. `applies` says whether the launcher is
    there at all; `strict` forbids going on to the next row when half of the variables are missing; `hosts`
    says that the processes of one host have the launcher's daemon of that job as common ancestor.
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
    # A batch script has SLURM_PROCID=0 and the job's number of tasks, and is one process all the same. Only
    # srun makes numbered steps; the highest numbers mean batch scripts and interactive shells.
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < 0xFFFFFFF0


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """This host's part of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),3" for hosts with 4, 4 and 3 tasks."""
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
    """Reads this process's place from the variables of the launcher; size 1 when there is none.

    TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD limits it to one kind of launcher: torchrun, mpi (or openmpi,
    pmi, pmix), pals, slurm, env, or auto; TORCHCOMM_RANK and TORCHCOMM_SIZE count in any case.

    Raises `InvalidArgumentError`, naming the variables, when they are incomplete, unreadable, contradict each
    other, or are not those that the method asks for.
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
                f"{name}={environ[name]!r} is not a number", hint=f"set it to one, or unset it ({row.name})"
            )
        return int(environ[name])

    rank, size = number([row.rank]), number(row.sizes)
    if rank is None and not environ.get(row.sizes[0]):
        return None
    if rank is None or size is None:
        there, missing = (row.rank, " or ".join(row.sizes)) if size is None else (row.sizes[0], row.rank)
        raise _HalfSetError(
            f"{there} is set, but {missing} is not",
            hint=f"set both or none of them; {TORCHCOMM.rank} and {TORCHCOMM.sizes[0]} go before all others",
        )
    local_rank, local_size = number(row.local_ranks), number(row.local_sizes)
    local_size = row.count_local(environ) if local_size is None else local_size
    if not 0 <= rank < size:
        raise InvalidArgumentError(
            f"{row.rank}={rank} is not in range [0, {size}), which is the size by {' or '.join(row.sizes)}",
            hint="ranks count from 0; see who else sets these variables",
        )
    if local_size is not None and not (local_rank or 0) < local_size <= size:
        raise InvalidArgumentError(
            f"local rank {local_rank} of {local_size} does not fit {size} ranks",
            hint=f"see who sets {', '.join(row.local_ranks + row.local_sizes)}",
        )
    job = "/".join(environ[name] for name in row.jobs if environ.get(name))
    return Environment(rank, size, local_rank, local_size, row.name, job)


def open_store(env: Environment, timeout: float, environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store that the ranks of a launcher share. Called by all of them; None for a single process.

    With MASTER_ADDR and MASTER_PORT it is a TCPStore there, which rank 0 hosts, unless torchrun does: one for
    the process, that later calls return as well, under a prefix for the attempt, so that a restarted job
    never reads keys of the one before. Without, and when the launcher keeps all ranks on one host, it is a
    FileStore in a private folder.

    Waits up to `timeout` seconds for rank 0. Raises `CommTimeoutError` naming rank 0 if it does not come,
    `BackendError` when the store cannot be opened, and `InvalidArgumentError` when the ranks have nothing in
    common to meet by.
    """
    if env.size == 1:
        return None
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if bool(host) != bool(port) or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidArgumentError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are no address",
            hint="set both, to rank 0's host and a free port there, or none, or pass store=",
        )
    if host:
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _cached(("tcp", host, port), lambda: _connect(env, host, int(port), agent, timeout))
        attempt = [environ[name] for name in TORCHRUN.jobs if environ.get(name)]
        return PrefixStore("/".join(["unicomm", *attempt]), store)
    row = next((row for row in LAUNCHERS if row.name == env.source), None)
    if row is not None and row.hosts and env.local_size == env.size:
        launcher = _launcher_process(row.rank)
        if launcher is not None or env.job:
            return _cached(("file", env.job, env.size), lambda: _open_file(env, launcher))
    raise InvalidArgumentError(
        f"{env.size} ranks (by {env.source}) have no store to meet at",
        hint="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on all ranks"
        " (Slurm: MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)), or pass store=",
    )


_BACKLOG = 2048  # as torch's store has it


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None


_slots: dict[tuple[object, ...], _Slot] = {}
_slots_lock = threading.Lock()
# FileStore removes its file with its last user, and only when it is destroyed in order.
atexit.register(_slots.clear)


def _cached(key: tuple[object, ...], make: Callable[[], Store]) -> Store:
    # A forked child must not talk on its parent's connection.
    with _slots_lock:
        slot = _slots.setdefault((os.getpid(), *key), _Slot())
    with slot.lock:
        if slot.store is None:
            slot.store = make()
        return slot.store


def _connect(env: Environment, host: str, port: int, agent: bool, timeout: float) -> Store:
    master, limit = env.rank == 0 and not agent, timedelta(seconds=max(timeout, 0.001))
    try:
        # multi_tenant: torch.distributed may host its store at the same address in this process.
        return TCPStore(
            host,
            port,
            is_master=master,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen_on_loopback(host, port) if master else None,
        )
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        if master or agent:
            raise BackendError(
                f"the store at {host}:{port} could not be {'opened' if master else 'reached'}: {text}",
                rank=env.rank,
                hint="MASTER_ADDR has to be rank 0's host, and MASTER_PORT a free port there: choose another"
                if master
                else "torchrun hosts it: see whether it still runs there, and whether this host reaches it",
            ) from error
        raise CommTimeoutError(
            f"rank 0, which hosts the store, did not come to {host}:{port} within {timeout:g} s: {text}",
            rank=env.rank,
            culprits=[0],
            hint="see whether rank 0 came up, and whether this host reaches that address",
        ) from error


def _listen_on_loopback(host: str, port: int) -> int | None:
    """A socket for a store that only this host is to reach, for torch's own would listen to the world.

    None for any other address, and when somebody listens there: this process's other store, or a stranger,
    which torch tells apart.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not ipaddress.ip_address(address[0]).is_loopback:
            return None
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError):
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener.detach()


def _open_file(env: Environment, launcher: tuple[int, int] | None) -> Store:
    folder = Path(tempfile.gettempdir()) / f"unicomm-stores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise BackendError(
            f"{folder} is not a private folder of this user",
            rank=env.rank,
            hint="remove it, or set TMPDIR to another place on all ranks, or MASTER_ADDR and MASTER_PORT",
        )
    # The name holds all that makes the job unique, and by what to see later that it is over: the launcher's
    # process, on this host since it was booted, in this PID namespace.
    here = _identity()
    for old in folder.glob(f"{here}-*"):
        pid, ticks, _ = old.name[len(here) + 1 :].split("-")
        if int(pid) and not _lives(int(pid), int(ticks)):
            with contextlib.suppress(OSError):
                old.unlink()
    pid, ticks = map(str, launcher or (0, 0))
    job = hashlib.sha256(f"{env.source}/{env.job}/{env.size}".encode()).hexdigest()[:16]
    return FileStore(str(folder / f"{here}-{pid}-{ticks}-{job}"), env.size)


def _identity() -> str:
    """This boot of this host, and this process's PID namespace: where a process id means something."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _launcher_process(rank_variable: str) -> tuple[int, int] | None:
    """Process id and start time of the launcher on this host: the first ancestor without a rank of its own.

    The parent alone will not do: there may be a shell in between, another one for each rank.
    """
    pid = os.getppid()
    try:
        while pid > 0:
            with contextlib.suppress(PermissionError):  # another user's: not started by this rank
                if f"\0{rank_variable}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                    pid = int(_status(pid)[1])
                    continue
            return pid, int(_status(pid)[19])
    except OSError:
        pass  # no /proc, or one that hides other users' processes
    return None


def _status(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on, as the command's name in front of it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _lives(pid: int, ticks: int) -> bool:
    try:
        return int(_status(pid)[19]) == ticks
    except OSError:
        return False
