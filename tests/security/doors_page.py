"""The table of SECURITY.md: what listens where during each way to start a job, seen in real jobs.

    python -m tests.security.doors_page            prints it
    python -m tests.security.doors_page --write    renews it in SECURITY.md

Each job runs on hosts that are network namespaces, with two ranks. What listens is read from the processes'
sockets; for what, and who may use it, from the answer to a caller that knows nothing, and from the library
that made the socket; a third host tries to reach each socket. Ranks that connect to each other are held in
the middle, to see what listens only then. Needs root, a C++ compiler, and MPI libraries for the rows of
mpiexec; a row that cannot be made is left as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import mpi_on_hosts
from tests import ROOT
from tests.backends.hosts.namespace_job import PORT, Job
from tests.commands import clean_environment, run
from tests.mocks.nccl.build import NoCompiler
from tests.security import listeners, socket_owners
from tests.security.listeners import Listener
from tools import mpi_libraries, namespaces

PAGE = ROOT / "SECURITY.md"
BEGIN, END = "<!-- doors: begin (make docs) -->", "<!-- doors: end -->"
PROGRAMS = Path(__file__).parent / "programs"
GROUP, COMM = PROGRAMS / "waits.py", PROGRAMS / "waits_comm.py"
HEADINGS = (
    "way",
    "process",
    "listens for",
    "sockets",
    "bound to",
    "what a caller needs",
    "other hosts reach it",
)
_SWITCH = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
_STRANGER = 2  # the host that takes no part
_WITHIN = 600.0  # seconds that a job may take, with the looks at it


@dataclass(frozen=True, order=True)
class Door:
    """Listening sockets of one kind, of all hosts of a job together."""

    process: str
    purpose: str
    sockets: int
    bound: str
    needed: str
    reached: str

    @property
    def cells(self) -> list[str]:
        return [self.process, self.purpose, str(self.sockets), self.bound, self.needed, self.reached]


class Missing(Exception):
    """This machine cannot start a job in that way."""


class TracedJob(Job):
    """A job whose processes note which of their libraries make sockets."""

    def __init__(self, hosts: namespaces.Namespaces, place: Path, more: Mapping[str, str]) -> None:
        super().__init__(hosts, place, _WITHIN, fresh=True)
        self._more = dict(more)

    def start(self, host: int, *arguments: object, **more: object) -> None:
        super().start(host, *arguments, **self._more, **more)

    def start_beside(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        """Starts a command that is not within a host, as it enters them itself."""
        self.processes.append(
            subprocess.Popen(
                [*command],
                env=clean_environment() | self._more | dict(more),
                stdin=subprocess.DEVNULL,
                stdout=self._log(len(self.processes)).open("w"),
                stderr=subprocess.STDOUT,
                text=True,
            )
        )


# --- the ways -----------------------------------------------------------------------------------------


def _run(job: Job, folder: Path, hosts: int, *options: object, **more: object) -> None:
    for host in range(hosts):
        ranks = f"--nproc-per-node={2 // hosts}"
        words = (*options, f"--node-rank={host}") if hosts > 1 else options
        job.start(host, "-m", "unicomm", "run", ranks, *words, GROUP, folder, **more)


def _endpoint(job: Job) -> tuple[str, ...]:
    return ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={job.hosts.address(0)}:{PORT}")


def _torchrun(job: Job, folder: Path, hosts: int, *options: object) -> None:
    for host in range(hosts):
        # torchrun announces the host's own name, which means nothing in these namespaces.
        own = (f"--local-addr={job.hosts.address(host)}",) if hosts > 1 else ()
        conf = (f"--rdzv-conf=is_host={int(host == 0)}",) if hosts > 1 else ()
        launch = ("-m", "torch.distributed.run", f"--nproc-per-node={2 // hosts}", *own, *conf, *options)
        job.start(host, *launch, GROUP, folder, **_SWITCH)


def _mpiexec(job: TracedJob, folder: Path, name: str, hosts: int, backend: str = "auto") -> None:
    libraries = [library for library in mpi_libraries.find()[0] if library.name == name]
    if not libraries:
        raise Missing(f"{name} is not installed: make .venv/mpi")
    program = [sys.executable, str(COMM), str(folder), backend]
    if hosts == 1:
        command = [*libraries[0].command, "-n", "2", *program]
        job.start(0, "-c", f"import os; os.execvp({command[0]!r}, {command!r})", **libraries[0].environment)
        return
    launch = mpi_on_hosts.command(libraries[0], job.hosts, hosts, 2 // hosts, str(folder))
    kept = mpi_on_hosts.ENVIRONMENT if backend == "mpi" else {}
    job.start_beside([*launch, *program], libraries[0].environment | {"UNICOMM_INTERFACE": "eth0", **kept})


def _by_hand(job: Job, folder: Path, program: Path, *arguments: str, **more: object) -> None:
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        master = {"MASTER_ADDR": job.hosts.address(0), "MASTER_PORT": PORT}
        job.start(rank, program, folder, *arguments, **place, **master, **more)


def _reconfigure(job: Job, folder: Path, hosts: int) -> None:
    # Nobody tells a single rank the way to the others, and these hosts have no default route.
    interface = {"UNICOMM_INTERFACE": "eth0"} if hosts > 1 else {}
    for rank in range(2):
        job.start(rank % hosts, COMM, folder, "gloo", "reconfigurable", RANK=0, WORLD_SIZE=1, **interface)


TOKEN = {"UNICOMM_JOB_TOKEN": "a token of the job"}
#: Each starts a job of two ranks in a folder; they write files `0` and `1`, or `up-...`, when they have met.
WAYS: dict[str, Callable[[TracedJob, Path], None]] = {
    "`unicomm run`, one host": lambda job, folder: _run(job, folder, 1, "--hub", "--metrics-port=0"),
    "`unicomm run`, two hosts": lambda job, folder: _run(job, folder, 2, "--hub", *_endpoint(job), **TOKEN),
    "`unicomm run`, two hosts, static rendezvous": lambda job, folder: _run(
        job,
        folder,
        2,
        "--no-hub",
        *("--nnodes=2", f"--master-addr={job.hosts.address(0)}", f"--master-port={PORT}"),
    ),
    "torchrun with the switch, one host": lambda job, folder: _torchrun(job, folder, 1, "--standalone"),
    "torchrun with the switch, two hosts": lambda job, folder: _torchrun(job, folder, 2, *_endpoint(job)),
    **{
        f"mpiexec of {name}, {'two hosts' if hosts == 2 else 'one host'}": partial(
            _mpiexec, name=name, hosts=hosts
        )
        for name in ("MPICH", "Open MPI")
        for hosts in (1, 2)
    },
    **{
        f"mpiexec of {name}, two hosts: backend `mpi`": partial(_mpiexec, name=name, hosts=2, backend="mpi")
        for name in ("MPICH", "Open MPI")
    },
    "`MASTER_ADDR` on all ranks, two hosts: `new_comm`": lambda job, folder: _by_hand(
        job, folder, COMM, "auto"
    ),
    "`MASTER_ADDR` on all ranks, two hosts: `init_process_group` with the switch": lambda job, folder: (
        _by_hand(job, folder, GROUP, **_SWITCH)
    ),
    "notebook": lambda job, folder: job.start(0, PROGRAMS / "in_a_notebook.py", folder),
    "`reconfigure`, one host": lambda job, folder: _reconfigure(job, folder, 1),
    "`reconfigure`, two hosts": lambda job, folder: _reconfigure(job, folder, 2),
}


# --- looking at a job ---------------------------------------------------------------------------------


def doors(way: str) -> list[Door]:
    """Starts a job in this way, looks at its sockets, and ends it. Raises `Missing`."""
    with _alone(way), tempfile.TemporaryDirectory() as place, namespaces.Namespaces(3) as hosts:
        folder = Path(place) / "ranks"
        folder.mkdir()
        try:
            more = socket_owners.environment(Path(place)) | {"HELD_CREATION": str(folder)}
            # Open MPI names folders there by process numbers, which namespaces have in common.
            more["TMPDIR"] = place
        except NoCompiler as error:
            raise Missing(str(error)) from None
        with TracedJob(hosts, Path(place), more) as job:
            WAYS[way](job, folder)
            _await(job, lambda: (folder / "held").exists() or _have_met(folder))
            early = _look(job, more) if not _have_met(folder) else []
            (folder / "go on").touch()
            _await(job, lambda: _have_met(folder))
            seen = _look(job, more)
            lasting = {(one.host, one.where) for one in seen}
            # What one rank does not answer while it is held, another one of the same kind does.
            passing = [one for one in early if (one.host, one.where) not in lasting]
            answered = {one.what: one.needed for one in passing if one.needed != listeners.NOT_SEEN}
            seen += [replace(one, needed=answered.get(one.what, one.needed)) for one in passing]
            (folder / "go").touch()
            if "Open MPI" in way:
                # Where its hosts are namespaces, MPI_Finalize does not return in all runs.
                _await(job, lambda: len([*folder.glob("down-*")]) == 2)
                for process in job.processes:
                    process.terminate()
                    process.wait(_WITHIN)
            else:
                codes = [process.wait(_WITHIN) for process in job.processes]
                assert not any(codes), f"{way}: {codes}\n{job}"
    counts = Counter((one.where.process, one.what, one.where.bound, one.needed, one.reached) for one in seen)
    return sorted(Door(p, what, n, bound, needed, far) for (p, what, bound, needed, far), n in counts.items())


@contextlib.contextmanager
def _alone(way: str) -> Iterator[None]:
    """Lets one job of Open MPI run at a time on this machine.

    Its launchers do not expect others whose hosts have the same names and process numbers: a job that ran
    beside another one of this file did not start, or did not end.
    """
    if "Open MPI" not in way:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"unicomm-doors-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class _Seen:
    """A socket of a host, at one time."""

    host: int
    where: Listener
    what: str
    needed: str
    reached: str


def _have_met(folder: Path) -> bool:
    return len([*folder.glob("up-*"), *folder.glob("[01]")]) == 2


def _await(job: Job, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _WITHIN
    while not condition():
        assert time.monotonic() < end, f"the ranks have not met:\n{job}"
        assert not any(process.poll() for process in job.processes), str(job)
        time.sleep(0.05)


def _look(job: Job, more: Mapping[str, str]) -> list[_Seen]:
    found = [
        (host, Listener(*one), what, needed)
        for host in (0, 1)
        for one, (what, needed) in _listeners(job, host, more)
    ]
    targets = {_target(job, host, one) for host, one, _, _ in found if one.kind == "TCP"}
    reached = set(_listeners(job, _STRANGER, more, *targets)) if targets else set()
    return [
        _Seen(host, one, what, needed, "yes" if _target(job, host, one) in reached else "no")
        for host, one, what, needed in found
    ]


def _listeners(job: Job, host: int, more: Mapping[str, str], *targets: str) -> Any:
    """Looks from the network of a host, but at the processes of this machine: mpiexec is in no host."""
    network = ["nsenter", f"--net=/var/run/netns/{job.hosts.names[host]}", "--"]
    command = [*network, sys.executable, "-m", "tests.security.listeners", *targets]
    kept = {name: value for name, value in more.items() if name != "LD_PRELOAD"}
    return json.loads(run(command, _WITHIN, os.environ | kept, check=True).stdout)


def _target(job: Job, host: int, one: Listener) -> str:
    """Where another host would look for this socket."""
    address = one.address if one.bound == "one address" else job.hosts.address(host)
    return f"{address}:{one.port}"


# --- the page -----------------------------------------------------------------------------------------


def rows(way: str, found: list[Door]) -> list[str]:
    """The lines of the table for one way."""
    if not found:
        return [f"| {way} | no process listens | | 0 | | | |"]
    return [f"| {way} | {' | '.join(door.cells)} |" for door in found]


def written(page: str) -> dict[str, list[str]]:
    """The lines of the table in the page, by way."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    by_way: dict[str, list[str]] = {}
    for line in table.splitlines():
        if line.startswith("| ") and not line.startswith(f"| {HEADINGS[0]} "):
            by_way.setdefault(line.split(" | ")[0].removeprefix("| "), []).append(line)
    return by_way


def table(by_way: dict[str, list[str]]) -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    return "\n".join([*lines, *(line for way in WAYS for line in by_way.get(way, []))])


def renewed(page: str, by_way: dict[str, list[str]]) -> str:
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE} has no marks"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table(by_way)}\n\n{END}", page)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--write", action="store_true", help="renew the table in SECURITY.md")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only this way; may be repeated")
    options = parser.parse_args()
    by_way = written(PAGE.read_text())
    if why := namespaces.why_not():
        print(f"SECURITY.md stays as it is: no namespaces: {why}", file=sys.stderr)
        return
    for way in options.way or WAYS:
        try:
            by_way[way] = rows(way, doors(way))
        except Missing as error:
            print(f"{way}: {error}", file=sys.stderr)
        print("\n".join(by_way.get(way, [])), flush=True)
        if options.write:
            PAGE.write_text(renewed(PAGE.read_text(), by_way))


if __name__ == "__main__":
    main()
