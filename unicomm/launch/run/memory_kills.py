"""Evidence that the kernel killed a rank for want of memory.

SIGKILL alone is no evidence: schedulers and people send it, too. The kernel counts its kills for each control
group (`oom_kill` in memory.events, or in memory.oom_control of version 1), and names the process in its log,
which often only root can read. Kernel documentation: Control Group v2, "Memory Interface Files".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from unicomm.flight_recorder.ring.folder import process_code

_GROUPS = Path("/sys/fs/cgroup")
_LOG = "/dev/kmsg"
_KILLED = re.compile(r"Killed process (\d+) ")
_LINE = 8192  # bytes of one record of the log, at most


class MemoryKills:
    """Looks for kills of this host's ranks: `watch` while they run, `evidence` when one was killed."""

    def __init__(self) -> None:
        self._counter_of: dict[int, Path] = {}  # by process
        self._before: dict[Path, int] = {}
        self._logged: set[int] = set()
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def watch(self, pids: Iterable[int]) -> None:
        """Notes the control groups of processes; to be called while they run, since they may change."""
        for pid in pids:
            counter = _counter(pid)
            # A process that has ended belongs to the outermost group.
            if counter is not None and process_code(pid) not in ("Z", "X", ""):
                self._counter_of[pid] = counter
                self._before.setdefault(counter, _kills(counter))

    def evidence(self, pid: int) -> str:
        """Returns a sentence that says why the kernel killed this process; "" if nothing says so."""
        self._read_log()
        if pid in self._logged:
            return f"the kernel's log: it killed process {pid}, because memory ran out"
        counter = self._counter_of.get(pid)
        if counter is None or (now := _kills(counter)) <= self._before[counter]:
            return ""
        count = now - self._before[counter]
        return (
            f"the kernel has killed {count} process{'es' if count > 1 else ''} of its control group"
            f" for want of memory ({counter})"
        )

    def _read_log(self) -> None:
        while self._log >= 0:
            try:
                record = os.read(self._log, _LINE)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            if killed := _KILLED.search(record.decode("utf-8", "replace")):
                self._logged.add(int(killed[1]))

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _counter(pid: int) -> Path | None:
    """The file that counts the kills in the control group of a process; None if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                counter = _GROUPS / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                counter = _GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            else:
                continue
            if counter.exists():
                return counter
    return None


def _kills(counter: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in counter.read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
