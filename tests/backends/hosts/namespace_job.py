"""Ranks on hosts that are network namespaces: processes, what they say, and an end for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.commands import clean_environment
from tests.processes import forked_interpreters
from tools.namespaces import Namespaces

PROGRAMS = Path(__file__).parent / "programs"
WITHIN = 250.0  # seconds that a job may take: a hang, not a slow machine
PORT = 29500  # of a network that nobody else is in


class Job:
    """Processes that print JSON, a value a line. Past its deadline all are killed, which ends any wait.

    With `fresh`, each is a new interpreter; else it is forked from a server that has torch.
    """

    def __init__(self, hosts: Namespaces, folder: Path, within: float = WITHIN, fresh: bool = False) -> None:
        self._popen = subprocess.Popen if fresh else forked_interpreters.Popen
        self.hosts = hosts
        self._folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self._overdue = threading.Timer(within, self.end)

    def __enter__(self) -> Job:
        self._overdue.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._overdue.cancel()
        self.end()

    def end(self) -> None:
        for process in self.processes:
            process.kill()

    def start(self, host: int, *arguments: object, **more: object) -> None:
        """Starts a Python on a host, with more environment."""
        rings = self._folder / f"rings{len(self.processes)}"
        rings.mkdir(mode=0o700)
        kept = clean_environment() | {"UNICOMM_TRACE_DIR": str(rings)}
        self.processes.append(
            self._popen(
                [*self.hosts.enter(host), sys.executable, *map(str, arguments)],
                env=kept | {k: str(v) for k, v in more.items()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log(len(self.processes)).open("w"),
                text=True,
            )
        )

    def start_ranks(self, placement: list[int], program: str, *arguments: object) -> None:
        """One process for each rank; `placement` names their hosts."""
        for rank, host in enumerate(placement):
            self.start(
                host,
                PROGRAMS / program,
                *arguments,
                RANK=rank,
                WORLD_SIZE=len(placement),
                LOCAL_RANK=placement[:rank].count(host),
                MASTER_ADDR=self.hosts.address(placement[0]),
                MASTER_PORT=PORT,
            )

    def hear(self, index: int) -> Any:
        """The next thing that a process says."""
        stream = self.processes[index].stdout
        assert stream is not None
        line = stream.readline()
        assert line, f"process {index} said no more:\n{self}"
        return json.loads(line)

    def tell(self, index: int) -> None:
        stream = self.processes[index].stdin
        assert stream is not None
        stream.write("go on\n")
        stream.flush()

    def _log(self, index: int) -> Path:
        return self._folder / f"{index}.log"

    def __str__(self) -> str:
        logs = (self._log(i).read_text()[-2000:] for i in range(len(self.processes)))
        return "\n".join(f"--- process {i}\n{log}" for i, log in enumerate(logs))
