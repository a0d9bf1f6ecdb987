"""Ranks as real processes, driven by a test.

A test starts a `Job` of n ranks, each a process that runs one of the scripts in programs/, reads the events
that they print (`next`), tells them to go on (`tell`), sends them signals and waits for their ends. Nothing
sleeps, and everything has a deadline: past it, the job's processes are killed and what they printed is shown.

The processes come from a fork server (programs/server.py) that has imported torch and unicomm, because an
interpreter with torch takes two seconds to start. Each has its own pid, process group, pipes, environment and
end of the interpreter. tests/processes/test_launchers.py starts interpreters from scratch instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.commands import clean_environment
from tests.eventually import eventually

PROGRAMS = Path(__file__).parent / "programs"
WITHIN = 30.0  # seconds that anything may take where a test says nothing else: a hang, not a slow machine

Event = dict[str, Any]


class Overdue(AssertionError):
    """A deadline of a test passed."""


class ForkServer:
    """Starts rank processes; one a test session.

    `settings` are variables of the server, for those that `import torch` reads, as the switch is. `modules`
    are imported beforehand as well.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, modules: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(120)
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "server.py"), str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=clean_environment() | (settings or {}),
            start_new_session=True,
        )
        theirs.close()
        if self._control.recv(100) != b"ready":
            raise AssertionError("the fork server did not start; see its output")

    def start(self, argv: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]) -> int:
        request = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
        socket.send_fds(self._control, [request], list(descriptors))
        return int(self._control.recv(100))

    def reap(self, pid: int) -> int:
        """Waits for the end of a process; its exit code, or minus the signal that ended it."""
        self._control.send(json.dumps({"reap": pid}).encode())
        return int(self._control.recv(100))

    def close(self) -> None:
        self._control.close()
        self._process.wait(WITHIN)


class RankProcess:
    """One process of a job. `events` is everything it has said, `complaints` its stderr."""

    def __init__(self, server: ForkServer, argv: Sequence[str], env: Mapping[str, str], rank: int) -> None:
        self.rank = rank
        self.events: list[Event] = []
        self.complaints = ""
        self.exit_code: int | None = None
        self._server = server
        self._read = 0
        self._changed = threading.Condition()
        pipes = [os.pipe() for _ in range(3)]
        self.pid = server.start(argv, env, [pipes[0][0], pipes[1][1], pipes[2][1]])
        # The process is not reaped before `end`, so that pid and descriptor mean this process and no other.
        self.pidfd = os.pidfd_open(self.pid)
        for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1]):
            os.close(descriptor)
        self._stdin = os.fdopen(pipes[0][1], "w")
        outputs = ((pipes[1][0], self._on_stdout), (pipes[2][0], self._on_stderr))
        self._readers = [
            threading.Thread(target=self._follow, args=output, daemon=True) for output in outputs
        ]
        for reader in self._readers:
            reader.start()

    def _follow(self, descriptor: int, take: Any) -> None:
        with os.fdopen(descriptor, errors="replace") as stream:
            for line in stream:
                with self._changed:
                    take(line)
                    self._changed.notify_all()

    def _on_stdout(self, line: str) -> None:
        try:
            self.events.append(json.loads(line))
        except ValueError:
            self.complaints += f"(stdout) {line}"

    def _on_stderr(self, line: str) -> None:
        self.complaints += line

    def next(self, event: str, within: float = WITHIN) -> Event:
        """The next thing that the process says, which must be `event`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.events) > self._read, within):
                raise Overdue(f"rank {self.rank} did not say '{event}' within {within:g} s\n{self}")
            said = self.events[self._read]
            self._read += 1
        assert said["event"] == event, f"rank {self.rank} said {said} instead of '{event}'\n{self}"
        return said

    def tell(self, line: str = "go on") -> None:
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def signal(self, number: int) -> None:
        """Sends a signal. After SIGSTOP no thread of the process runs any more when this returns."""
        signal.pidfd_send_signal(self.pidfd, number)
        if number == signal.SIGSTOP:
            eventually(self._is_stopped)  # until one thread has taken the signal, the others go on

    def _is_stopped(self) -> bool:
        stats = Path(f"/proc/{self.pid}/task").glob("*/stat")
        try:
            return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} <= {"T", "Z", "X"}
        except OSError:  # a thread has just ended
            return False

    def end(self, within: float = WITHIN) -> int:
        """Waits for the end of the process; its exit code, or minus the signal that ended it."""
        if self.exit_code is None:
            if not select.select([self.pidfd], [], [], within)[0]:
                raise Overdue(f"rank {self.rank} did not end within {within:g} s\n{self}")
            self.exit_code = self._server.reap(self.pid)
            os.close(self.pidfd)
            with contextlib.suppress(OSError):
                self._stdin.close()
            for reader in self._readers:
                reader.join(1.0)
        return self.exit_code

    def destroy(self) -> None:
        """Ends the process and whatever it started."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.end()

    def __str__(self) -> str:
        said = "\n".join(f"    {json.dumps(event)}" for event in self.events) or "    nothing"
        who = f"rank {self.rank} (pid {self.pid}, exit code {self.exit_code})"
        return f"  {who} said:\n{said}\n{self.complaints}"


class Job:
    """n ranks of one script. As a context manager it leaves no process behind."""

    def __init__(
        self,
        server: ForkServer,
        script: str,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        store: TCPStore | None,
    ) -> None:
        self._store = store  # lives as long as the job
        self.script = PROGRAMS / script
        argv = [str(self.script), *arguments]
        self.ranks: list[RankProcess] = []
        for rank, env in enumerate(environments):
            self.ranks.append(RankProcess(server, argv, env, rank))

    def __getitem__(self, rank: int) -> RankProcess:
        return self.ranks[rank]

    def but(self, *ranks: int) -> list[RankProcess]:
        """All ranks except some."""
        return [process for process in self.ranks if process.rank not in ranks]

    def next(self, event: str, within: float = WITHIN) -> list[Event]:
        """What all ranks say next, which must be `event`."""
        try:
            return [process.next(event, within) for process in self.ranks]
        except AssertionError as error:
            raise type(error)(f"{error}\nthe whole job:\n{self}") from None

    def tell(self, line: str = "go on") -> None:
        for process in self.ranks:
            process.tell(line)

    def close_store(self) -> None:
        """The store that the ranks met through is gone from now on."""
        assert self._store is not None
        port, self._store = self._store.port, None
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "somebody else holds the store"

    def end(self, within: float = WITHIN) -> list[int]:
        """Waits for the ends of all ranks; their exit codes."""
        deadline = time.monotonic() + within
        return [process.end(max(0.0, deadline - time.monotonic())) for process in self.ranks]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.destroy()

    def __str__(self) -> str:
        return "\n".join(map(str, self.ranks))


def agent_environments(size: int, store: TCPStore, base: Mapping[str, str]) -> list[dict[str, str]]:
    """What torchrun's agent gives its ranks, with a store that somebody else hosts."""
    return [
        dict(base)
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        for rank in range(size)
    ]


def new_store() -> TCPStore:
    """A store in this process, at a port that the kernel chooses."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
