"""One round, played: its ranks are started, watched, and struck when the time has come."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import nursery
from tests.chaos.rounds import FAULTS, Round
from tests.chaos.spec import CREATION, RINGS
from tests.commands import clean_environment
from tools.namespaces import Namespaces

LIMIT = 240.0  # seconds for a round: the longest timeout in it, and as much for what a rank lets go slowly
_PAUSE = 0.3  # seconds
_START = 300.0  # seconds for a nursery, on a machine that is busy


@dataclass
class Seen:
    """What became of a rank. `when`: by this machine's monotonic clock."""

    step: int = -1
    outcome: str = ""
    culprits: list[int] = field(default_factory=list)
    text: str = ""
    when: float = 0.0
    left: list[str] | None = None  # behind in its process; None when it did not come to look
    exit_code: int | None = None
    handle: int = -1  # of the process, a pidfd
    forgotten: int = 0  # operations that Gloo never ended
    afterwards: str | None = None  # what was wrong with what it did after its error; None when it did nothing
    pid: int = 0
    inner_pid: int = 0  # as the rank itself sees it


class Nursery:
    """The process that forks a host's ranks."""

    def __init__(self, listener: Listener, listen: str, log: Path, host: int | None = None) -> None:
        self._process = psutil.Process(
            nursery.grow(str(listener.address), listen, clean_environment(), log, host)
        )
        self.link = accept(listener, _START)
        _, address, port = self.link.recv()
        self.store = f"{address}:{port}"

    def close(self) -> None:
        """Returns when none of its processes writes any more."""
        self.link.close()  # which ends it, unless it waits for ranks
        ranks = []
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(2.0)
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = self._process.children(recursive=True)
            self._process.kill()
            self._process.wait()
        end = time.monotonic() + 10.0
        while any(map(_runs, ranks)) and time.monotonic() < end:  # they end with it, but not at once
            time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    """Not so a zombie: the first process of a host's own numbers takes note of nobody's end."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def accept(listener: Listener, seconds: float) -> Connection:
    """The next that calls; raises `TimeoutError`."""
    waiting: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
    waiting.settimeout(seconds)
    return listener.accept()


class Stage:
    """Where rounds are played: nurseries on this machine's network and, when needed, on two hosts' own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="unicomm-chaos-")
        self.folder = Path(self._folder.name)
        self.listener = Listener(str(self.folder / "conductor"), "AF_UNIX", backlog=64)
        self._here: Nursery | None = None
        self._hosts: list[Nursery] = []
        self.namespaces: Namespaces | None = None

    def nurseries(self, plan: Round) -> list[Nursery]:
        """One for each rank."""
        if not plan.placement:
            self._here = self._here or Nursery(self.listener, "127.0.0.1", self.folder / "here.log")
            return [self._here] * plan.size
        if self.namespaces is None:
            self.namespaces = Namespaces(2)
            self.namespaces.__enter__()
        for host in range(len(self._hosts), 2):
            first, address = self.namespaces.first_process(host), self.namespaces.address(host)
            log = self.folder / f"host{host}.log"
            self._hosts.append(Nursery(self.listener, address, log, first))
        return [self._hosts[host] for host in plan.placement]

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for one in (self._here, *self._hosts):
                if one is not None:
                    one.close()
        finally:  # also when somebody asks for the end again
            if self.namespaces is not None:
                self.namespaces.__exit__()
            self.listener.close()
            self._folder.cleanup()


class Play:
    """`seen`: what became of each rank. `hung`: those that had to be killed. `struck`: when, or 0."""

    def __init__(self, plan: Round, stage: Stage, folder: Path, serial: int) -> None:
        self.plan, self._stage, self._folder = plan, stage, folder
        self.seen = [Seen() for _ in range(plan.size)]
        self.hung: list[int] = []
        self.struck = 0.0
        self._links: dict[Connection, int] = {}
        self._running: set[int] = set()
        (folder / RINGS).mkdir()
        nurseries = stage.nurseries(plan)
        self._nurseries = {n.link: n for n in nurseries}
        # The store is where rank 0 is, as torchrun has it.
        store, links = nurseries[0].store, str(stage.listener.address)
        specs = plan.specs(store, links, str(folder), f"round{plan.seed}-{serial}")
        for link in self._nurseries:
            mine = [spec for spec, n in zip(specs, nurseries, strict=True) if n.link is link]
            link.send(mine)
        self._running = set(range(plan.size))

    def run(self) -> None:
        end = time.monotonic() + LIMIT
        try:
            for _ in range(self.plan.size):
                self._meet(accept(self._stage.listener, max(0.0, end - time.monotonic())))
            self._watch(end)
        finally:
            self.hung = sorted(self._running)
            self._signal(signal.SIGCONT, self.hung)
            # Not when somebody ends the rounds: nobody hangs then, and a debugger takes many seconds a rank.
            if isinstance(sys.exc_info()[1], Exception | None):
                for rank in self.hung:
                    self._write_stacks(rank)
            self._signal(signal.SIGKILL, self.hung)
            self._cut(False)
            # Whatever it is, it ends by that; and by the end of the nursery, if this ends the rounds.
            while self._running and sys.exc_info()[0] is None:
                self._hear(None)
            for link in self._links:
                link.close()
            for seen in self.seen:
                if seen.handle >= 0:
                    os.close(seen.handle)

    def _write_stacks(self, rank: int) -> None:
        """Where a rank hangs: Python's frames go to its log, the native ones and Gloo's sockets to a file."""
        seen = self.seen[rank]
        if not seen.pid:
            return
        self._signal(signal.SIGQUIT, [rank])  # see program.main
        with (self._folder / f"rank{rank}.stacks").open("w") as out:
            for command in (
                ["gdb", "-p", str(seen.pid), "-batch", "-ex", "thread apply all bt 30"],
                ["nsenter", "-t", str(seen.pid), "-n", "ss", "-tnpi"],
            ):
                if shutil.which(command[0]):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        subprocess.run(command, stdout=out, stderr=out, timeout=30, check=False)

    def _meet(self, link: Connection) -> None:
        _, rank, inner = link.recv()
        # The kernel says which process called, as numbered here.
        with socket.socket(fileno=os.dup(link.fileno())) as s:
            pid, _, _ = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.seen[rank].handle, self.seen[rank].inner_pid = os.pidfd_open(pid), inner
        self.seen[rank].pid = pid
        self._links[link] = rank

    def _watch(self, end: float) -> None:
        """Reads what the ranks say until all have ended, and strikes when the time has come."""
        plan, never = self.plan, float("inf")
        strike_at = resume_at = never
        resumed = False
        if plan.at == CREATION:
            self.struck = time.monotonic()
        while self._running and (now := time.monotonic()) < end:
            if strike_at == never and not self.struck:
                first = self.seen[plan.victims[0]]
                strike_at = now + plan.delay if first.step >= plan.at else never
            if now >= strike_at and not self.struck:
                self.struck = now
                self._strike()
                lasts = {
                    "pause": _PAUSE,
                    "flicker": plan.lasts,
                    "stop": FAULTS["stop"].within,
                }
                resume_at = now + lasts.get(plan.act, never)
            if plan.act == "stop" and self.struck and not resumed:
                others = (s for r, s in enumerate(self.seen) if r not in plan.victims)
                resume_at = now if all(s.outcome for s in others) else resume_at
            if now >= resume_at and not resumed:
                resumed = True
                self._signal(signal.SIGCONT, plan.victims)
                self._cut(False)
            soonest = min(end, never if resumed else resume_at, never if self.struck else strike_at)
            self._hear(max(0.0, soonest - time.monotonic()))

    def _hear(self, seconds: float | None) -> None:
        for link in wait([*self._links, *self._nurseries], seconds):
            assert isinstance(link, Connection)
            try:
                said = link.recv()
            except (EOFError, OSError):
                if link in self._nurseries:
                    raise
                del self._links[link]
                link.close()
                continue
            if link in self._nurseries:
                _, rank, code = said
                self.seen[rank].exit_code = code
                self._running.discard(rank)
            else:
                self._note(self.seen[self._links[link]], *said)

    def _note(self, seen: Seen, when: float, what: str, *more: Any) -> None:
        if what == "step":
            seen.step = more[0]
        elif what == "end" and not seen.outcome:
            seen.outcome, seen.culprits, seen.text = more
            seen.when = when
        elif what == "left":
            seen.left, seen.forgotten = more
        elif what == "afterwards":
            (seen.afterwards,) = more

    def _strike(self) -> None:
        if self.plan.act == "kill":
            self._signal(signal.SIGKILL, self.plan.victims)
        elif self.plan.act in ("pause", "stop"):
            self._signal(signal.SIGSTOP, self.plan.victims)
        elif self.plan.act in ("cut", "flicker"):
            self._cut(True)

    def _signal(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self.seen[rank].handle >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.seen[rank].handle, number)

    def _cut(self, cut: bool) -> None:
        if self.plan.placement and self._stage.namespaces is not None:
            self._stage.namespaces.set_link(1, up=not cut)
