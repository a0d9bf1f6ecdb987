"""Identities of processes: whether a process of this host still runs, by what it has told the others."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<8sIQ?")
_MOST_PID = 1 << 22  # of Linux
_ENDED = "ZX"  # states of a process that has ended and was not waited for


def scope() -> str:
    """This boot of this host, and this process's PID namespace: the scope of a process id."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def status(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on; the command's name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lives(pid: int, ticks: int) -> bool:
    """Whether the process that was started at `ticks` runs. True if this process cannot tell."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    try:
        state = status(pid)
    except OSError:  # no descriptor is left, or it ends just now
        return True
    return int(state[19]) == ticks and state[0] not in _ENDED


@dataclass(frozen=True)
class Process:
    """A process as the other members of a meeting know it.

    Attributes:
        scope: 8 bytes; processes with the same ones see each other.
        pid, ticks: process id and start time; 0 where there is no /proc.
        holds_store: whether the store is in its memory.
    """

    scope: bytes
    pid: int
    ticks: int
    holds_store: bool

    @classmethod
    def this(cls, holds_store: bool) -> Process:
        pid = os.getpid()
        try:
            return cls(bytes.fromhex(scope()), pid, int(status(pid)[19]), holds_store)
        except (OSError, IndexError, ValueError):
            return cls(bytes(8), 0, 0, holds_store)

    @classmethod
    def read(cls, data: bytes) -> Process:
        """Reverses `pack`; raises `ValueError` for anything else."""
        try:
            found = cls(*_FORM.unpack(data))
        except struct.error as error:
            raise ValueError(f"{data[:40]!r} is no process") from error
        if found.pid > _MOST_PID:
            raise ValueError(f"{found.pid} is no process id")
        return found

    def pack(self) -> bytes:
        return _FORM.pack(self.scope, self.pid, self.ticks, self.holds_store)

    def has_ended(self, seen_from: Process) -> bool:
        """Whether it is known to have ended, by a process that may see it."""
        return bool(self.pid and self.scope == seen_from.scope) and not lives(self.pid, self.ticks)
