"""Where the rings live: chosen, private, bounded, cleaned of old runs."""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import tempfile
import time
from pathlib import Path

SUFFIX = ".ucring"
_MAGIC = b"UCRING01"
_DAY = 86400.0


class FolderError(OSError):
    """No folder for rings can be used; the message says why and what to do."""


def _candidates() -> list[Path]:
    uid = os.getuid()
    places = [Path("/dev/shm", f"unicomm-{uid}")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(runtime, "unicomm"))
    places.append(Path(tempfile.gettempdir(), f"unicomm-{uid}"))
    return places


def _private(path: Path) -> str:
    """Makes `path` if it is not there; why it is not private, or an empty text.

    A name in a shared folder can be taken by anybody beforehand, as a link to elsewhere or as a folder that
    others may write to: neither is used.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(info.st_mode):
        return "it is no folder"
    if info.st_uid != os.getuid():
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & 0o077:
        return f"others may enter it (mode {stat.S_IMODE(info.st_mode):o})"
    return "" if os.access(path, os.W_OK) else "it is not writable"


def rings_folder() -> Path:
    """The folder for this user's rings, created if it is not there.

    `UNICOMM_TRACE_DIR` if set, else a private folder on tmpfs. Raises `FolderError` when none can be used.
    """
    if given := os.environ.get("UNICOMM_TRACE_DIR"):
        path = Path(given)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"UNICOMM_TRACE_DIR={given}: {error}; name a folder that can be made") from None
        return path
    return private_folder()


def private_folder() -> Path:
    """This user's private folder, on tmpfs where there is one. Raises `FolderError`."""
    reasons = []
    for path in _candidates():
        reason = _private(path)
        if not reason:
            return path
        reasons.append(f"{path}: {reason}")
    raise FolderError(f"no private folder for rings ({'; '.join(reasons)}); set UNICOMM_TRACE_DIR to one")


def ring_name(rank: int, pid: int) -> str:
    """A new name for a ring; `rank` is negative for a process that is no rank of a job."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:48] or "host"
    who = f"rank{rank:05d}" if rank >= 0 else "solo"
    return f"{host}-{who}-{pid}-{secrets.token_hex(4)}{SUFFIX}"


def _process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on; none when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def process_code(pid: int) -> str:
    """The kernel's one-letter state of process `pid` (R, S, D, T, ...); "" when there is no such process."""
    fields = _process_fields(pid)
    return fields[0] if fields else ""


def process_start_ticks(pid: int) -> int | None:
    """The start time of process `pid` in clock ticks (field 22 of /proc/PID/stat).

    Returns None when there is no such process, or when it is a zombie.
    """
    fields = _process_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def pid_namespace() -> str:
    """In which numbers of processes mean the same; "" where that is not known."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_alive(path: Path) -> bool | None:
    """Whether the process behind a ring runs on this host; None for a file that is no ring."""
    try:
        with path.open("rb") as file:
            head = file.read(48)
    except OSError:
        return None
    if len(head) < 48 or head[:8] != _MAGIC:
        return None
    pid, ticks = int.from_bytes(head[16:20], "little"), int.from_bytes(head[32:40], "little")
    return process_start_ticks(pid) == ticks


def clean(
    folder: Path, max_bytes: int = 256 << 20, max_files: int = 512, max_age_days: float = 3.0
) -> list[Path]:
    """Removes rings of ended processes: old ones, then the oldest until the folder is within its bounds.

    Rings of running processes and files that are no rings stay. Returns what was removed.
    """
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            info = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and (alive := is_alive(path)) is not None:
            found.append((info.st_mtime, info.st_size, path, alive))
    total, count = sum(size for _, size, _, _ in found), len(found)
    oldest_allowed = time.time() - max_age_days * _DAY
    removed = []
    for modified, size, path, alive in sorted(found):
        if alive or (modified >= oldest_allowed and total <= max_bytes and count <= max_files):
            continue
        try:
            path.unlink()
        except OSError:
            continue
        removed.append(path)
        total -= size
        count -= 1
    return removed
