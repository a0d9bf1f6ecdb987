"""Ordinary programs of torch.distributed as ranks of a job, forked from a server that has imported torch.

`ForkedPrograms.run` starts a program on each rank as torchrun would, but in milliseconds instead of the two
seconds of an interpreter with torch. The switch is what the server has imported torch with, as in a process
that torchrun starts. Tests of the start itself use torchrun (tests/commands.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.commands import clean_environment
from tests.processes.rank_processes import ForkServer, agent_environments, new_store

SWITCH = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
# What programs of these tests import: once in the server instead of once a rank.
MODULES = (
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)
# Otherwise each rank that compiles starts interpreters with torch to compile in.
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


@dataclass
class Process:
    """A forked rank. `exit_code` is None while it runs."""

    pid: int
    pidfd: int
    exit_code: int | None = None


class ForkedPrograms:
    """Runs programs as ranks; keeps one server with the switch and one without, made when first needed."""

    def __init__(self) -> None:
        self._servers: dict[str, ForkServer] = {}

    def run(
        self, ranks: int, program: Path, *arguments: object, within: float = 220.0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end on ranks that meet as under torchrun, and returns what they printed.

        The exit code is that of a rank that failed, at which the others are ended; else 0.
        """
        store = new_store()  # lives as long as the ranks
        environments = agent_environments(ranks, store, env)
        codes, said, complaints = self.run_each(program, arguments, environments, within)
        failed = [code for code in codes if code not in (0, None)]
        first = next((code for code in failed if code != -signal.SIGKILL), failed[0] if failed else 0)
        return subprocess.CompletedProcess([str(program)], first, "".join(said), "".join(complaints))

    def run_each(
        self,
        program: Path,
        arguments: Sequence[object],
        environments: Sequence[Mapping[str, str]],
        within: float,
        fail_together: bool = True,
        but: Sequence[int] = (),
    ) -> tuple[list[int | None], list[str], list[str]]:
        """Runs a program with each of these environments; returns exit codes, and what stdout and stderr got.

        If one fails, the others are killed if `fail_together`. Nobody waits for the ranks in `but`: the exit
        code of one that still runs when the others have ended is None.
        """
        server = self._server(environments[0].get(SWITCH, "0"))
        base = clean_environment() | {"UNICOMM_TRACE_DIR": os.environ["UNICOMM_TRACE_DIR"]} | SETTINGS
        argv = [str(program), *map(str, arguments)]
        with contextlib.ExitStack() as files, open(os.devnull) as nothing:
            outputs = [
                [files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2)]
                for _ in environments
            ]
            processes = []
            try:
                for env, pair in zip(environments, outputs, strict=True):
                    descriptors = [nothing.fileno(), *(output.fileno() for output in pair)]
                    pid = server.start(argv, base | dict(env), descriptors)
                    processes.append(Process(pid, os.pidfd_open(pid)))
                late = not _wait(server, processes, within, fail_together, but)
                codes = [process.exit_code for process in processes]
            finally:
                for process in processes:
                    if process.exit_code is None:
                        _end(server, process)
                    os.close(process.pidfd)
            said, complaints = ([_text(pair[i]) for pair in outputs] for i in (0, 1))
        if late:
            text = "\n".join(f"rank {r}:\n{out}{complaints[r]}" for r, out in enumerate(said))
            raise AssertionError(f"{argv} did not end within {within:g} s: {codes}\n{text[-8000:]}")
        return codes, said, complaints

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _server(self, switch: str) -> ForkServer:
        if switch not in self._servers:
            self._servers[switch] = ForkServer({SWITCH: switch} | SETTINGS, MODULES)
        return self._servers[switch]


def _wait(
    server: ForkServer, processes: Sequence[Process], within: float, fail_together: bool, but: Sequence[int]
) -> bool:
    """Waits for the ends of all but some; whether they came in time."""
    end = time.monotonic() + within
    awaited = {process.pidfd: process for rank, process in enumerate(processes) if rank not in but}
    while awaited:
        ended = select.select(list(awaited), [], [], max(0.0, end - time.monotonic()))[0]
        if not ended:
            return False
        for process in [awaited.pop(descriptor) for descriptor in ended]:
            _end(server, process)
        if fail_together and any(process.exit_code for process in processes):
            return True
    for process in (processes[rank] for rank in but):  # may have ended as well, by itself
        if select.select([process.pidfd], [], [], 0)[0]:
            _end(server, process)
    return True


def _end(server: ForkServer, process: Process) -> None:
    """Kills what is left of a process's group and reaps it: until then its pid means this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.exit_code = server.reap(process.pid)


def _text(output: IO[str]) -> str:
    output.seek(0)
    return output.read()
