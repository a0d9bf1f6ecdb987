"""Turns: with real values all ranks are alive, and one runs while the others wait for data.

A rank that needs data which another rank has not sent yet tells the parent the files in which the data would
be. The parent gives the turn to a rank whose data is there. If there is none, no rank can go on: all are told
so, and end where they are.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unicomm.flight_recorder.ring.endings import signal_name

_GO, _NEVER = b"g", b"n"
_LOOK = 0.5  # seconds between two looks at deadlines, and at the memory
_LEAST_MEMORY = 0.05  # part of the machine's memory that has to be available
_MEMORY_ENDS = (
    "was ended because the machine's memory was running out with all ranks alive at once (--values made-up"
    " runs one after the other, --meta needs no memory for large tensors)"
)


class Stuck(BaseException):
    """What a rank waits for never comes: it ends here, as it would hang."""


class Turn:
    """A rank's side: the pipe to the parent, and the one from it."""

    def __init__(self, to_parent: int, from_parent: int) -> None:
        self._to_parent, self._from_parent = to_parent, from_parent

    def begin(self) -> None:
        """Waits for the first turn."""
        self._ask(())

    def wait(self, files: Sequence[Path]) -> Path:
        """Waits until one of the files is there, and returns it. Raises `Stuck` if none ever comes."""
        while True:
            for file in files:
                if file.exists():
                    return file
            self._ask(files)

    def _ask(self, files: Sequence[Path]) -> None:
        os.write(self._to_parent, b"".join(b"%s\0" % os.fsencode(file) for file in files) + b"\n")
        if os.read(self._from_parent, 1) != _GO:
            raise Stuck


@dataclass
class _Rank:
    """A rank as the parent sees it.

    `files`: those that it waits for, None while it runs. `request`: what it has written of its next wait.
    `began`: whether it has asked for its first turn.
    """

    pid: int
    rank: int
    to: int
    until: float
    files: list[bytes] | None = None
    request: bytes = b""
    began: bool = False

    @property
    def ready(self) -> bool:
        return self.files is not None and (not self.files or any(os.path.exists(f) for f in self.files))


def run_in_turns(
    ranks: Sequence[int],
    fork: Callable[[int], tuple[int, int, int]],
    patience: float,
    jobs: int,
    progress: Callable[[int], None],
) -> dict[int, str]:
    """Runs all ranks, of which `jobs` at a time have the turn. Returns why ranks ended that were killed.

    `fork`: starts a rank, and returns a pipe from it, a pipe to it, and its process.
    """
    alive: dict[int, _Rank] = {}
    ends: dict[int, str] = {}
    try:
        for rank in ranks:
            out, into, pid = fork(rank)
            alive[out] = _Rank(pid, rank, into, time.monotonic() + patience)
        looked = time.monotonic()
        while alive:
            _give(list(alive.values()), jobs, patience)
            for out in select.select(list(alive), [], [], _LOOK)[0]:
                one = alive[out]
                one.request += (data := os.read(out, 1 << 16))
                if not data:
                    del alive[out]
                    if why := _ended(one, out):
                        ends.setdefault(one.rank, why)
                    progress(len(ranks) - len(alive))
                elif one.request.endswith(b"\n"):
                    one.began = True
                    one.files, one.request = [f for f in one.request[:-1].split(b"\0") if f], b""
            for one in alive.values():
                if one.files is None and time.monotonic() > one.until:
                    os.kill(one.pid, signal.SIGKILL)
                    ends[one.rank] = "did not end in time"
            if time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                if available_memory() < _LEAST_MEMORY:
                    ends |= {one.rank: _MEMORY_ENDS for one in alive.values()}
                    break
    finally:
        for out, one in alive.items():
            os.kill(one.pid, signal.SIGKILL)
            _ended(one, out)
    return ends


def available_memory() -> float:
    """Returns the part of the machine's memory that is available, 0 to 1; 1 if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError):
        return 1.0


def _give(alive: Sequence[_Rank], jobs: int, patience: float) -> None:
    """Gives turns. If all ranks wait for what is not there, they are told that it never comes."""
    running = sum(one.files is None and one.began for one in alive)
    ready = [one for one in alive if one.ready][: max(0, jobs - running)]
    if not ready and not running and all(one.began for one in alive):
        for one in alive:
            one.files = None
            os.write(one.to, _NEVER)
    for one in ready:
        one.files = None
        one.until = time.monotonic() + patience
        os.write(one.to, _GO)


def _ended(one: _Rank, out: int) -> str:
    """Returns by which signal a rank ended, "" if by none."""
    status = os.waitpid(one.pid, 0)[1]
    os.close(out)
    os.close(one.to)
    return f"was ended by {signal_name(-os.WTERMSIG(status))}" if os.WIFSIGNALED(status) else ""
