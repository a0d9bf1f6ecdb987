"""The table of SECURITY.md: what listens where during each way to start a job, seen in real jobs.

    python -m tests.security.doors_page            prints it
    python -m tests.security.doors_page --write    renews it in SECURITY.md

Each job runs on hosts that are network namespaces, with two ranks. What listens is read from the processes'
sockets; for what, and who may use it, from the answer to a caller that knows nothing; a third host tries to
reach each socket. Needs root, and MPICH for the row of mpiexec; a row that cannot be made is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.backends.hosts.namespace_job import PORT, Job
from tests.commands import run
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
_WITHIN = 250.0  # seconds that a job may take, with the looks at it


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


def _mpiexec(job: Job, folder: Path) -> None:
    mpich = [library for library in mpi_libraries.find()[0] if library.name == "MPICH"]
    if not mpich:
        raise Missing("MPICH is not installed: make .venv/mpi")
    command = [*mpich[0].command, "-n", "2", sys.executable, str(COMM), str(folder), "auto"]
    job.start(0, "-c", f"import os; os.execvp({command[0]!r}, {command!r})", **mpich[0].environment)


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
WAYS: dict[str, Callable[[Job, Path], None]] = {
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
    "mpiexec, one host": _mpiexec,
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
    with (
        tempfile.TemporaryDirectory() as place,
        namespaces.Namespaces(3) as hosts,
        Job(hosts, Path(place), _WITHIN, fresh=True) as job,
    ):
        folder = Path(place) / "ranks"
        folder.mkdir()
        WAYS[way](job, folder)
        _await_ranks(job, folder)
        seen = [(host, *each) for host in (0, 1) for each in _look(job, host)]
        targets = {_target(job, host, one) for host, one, _, _ in seen}
        reached = set(_listeners(job, _STRANGER, *targets)) if targets else set()
        (folder / "go").touch()
        codes = [process.wait(_WITHIN) for process in job.processes]
        assert not any(codes), f"{way}: {codes}\n{job}"
    counts = Counter(
        (one.process, what, one.bound, needed, "yes" if _target(job, host, one) in reached else "no")
        for host, one, what, needed in seen
    )
    return sorted(Door(p, what, n, bound, needed, far) for (p, what, bound, needed, far), n in counts.items())


def _await_ranks(job: Job, folder: Path) -> None:
    end = time.monotonic() + _WITHIN
    while len([*folder.glob("up-*"), *folder.glob("[01]")]) < 2:
        assert time.monotonic() < end, f"the ranks have not met:\n{job}"
        assert not any(process.poll() for process in job.processes), str(job)
        time.sleep(0.05)


def _look(job: Job, host: int) -> list[tuple[Listener, str, str]]:
    return [(Listener(*one), what, needed) for one, (what, needed) in _listeners(job, host)]


def _listeners(job: Job, host: int, *targets: str) -> Any:
    command = [*job.hosts.enter(host), sys.executable, "-m", "tests.security.listeners", *targets]
    return json.loads(run(command, _WITHIN, check=True).stdout)


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
