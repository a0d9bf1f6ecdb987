"""The folder for rings: how it is chosen, kept private and bounded.

Facts about processes, by their number.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import ANYONE, anyone_may_remove, read_file, trusted_owners

SUFFIX = ".ucring"
_MAGIC = b"UCRING01"
_DAY = 86400.0
CLEAN_CLOSE = 1  # a flag in the header: the process has closed its ring
MOST_META = 1 << 20  # bytes of what a process writes about itself


class FolderError(OSError):
    """No folder for rings is usable; the message says why, and what to do."""


class OpenFolderError(FolderError):
    """Every user may remove and replace the files of the folder that the user has named for rings."""


def _candidates() -> list[Path]:
    uid = os.getuid()
    places = [Path("/dev/shm", f"unicomm-{uid}")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.append(Path(runtime, "unicomm"))
    places.append(Path(tempfile.gettempdir(), f"unicomm-{uid}"))
    return places


def _private(path: Path) -> str:
    """Creates the folder `path` if it is missing. Returns why it is not private, or "" when it is.

    Another user may have taken the name in a shared folder, with a link or with a folder that others may
    write to. Neither is used.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a folder"
    if info.st_uid != os.getuid():
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & 0o077:
        return f"others may enter it (mode {stat.S_IMODE(info.st_mode):o})"
    return "" if os.access(path, os.W_OK) else "it is not writable"


def rings_folder() -> Path:
    """Returns the folder for this user's rings, and creates it if it is missing.

    The folder is `UNICOMM_TRACE_DIR` if that is set, else `private_folder()`. Raises `OpenFolderError` when
    every user may remove what is in the given folder, `FolderError` when no folder is usable.
    """
    if given := os.environ.get("UNICOMM_TRACE_DIR"):
        return named_folder(Path(given), f"UNICOMM_TRACE_DIR={given}")
    return private_folder()


def named_folder(path: Path, where: str) -> Path:
    """Returns a folder that the user has named for rings, and creates it if it is missing.

    `where`: how the user named it, for errors. Raises `OpenFolderError` when every user may remove what is in
    it, `FolderError` when it cannot be created.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        text = "is not valid UTF-8; name a folder that is"
        raise FolderError(f"{where.encode(errors='backslashreplace').decode()} {text}") from None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refused = anyone_may_remove(path)
    except OSError as error:
        raise FolderError(f"{where}: {error}; name a folder that can be created") from None
    if refused:
        raise OpenFolderError(
            f"{where}: every user may remove and replace files there, so rings in it could not be relied on;"
            f" run `chmod o-w {shlex.quote(str(path))}`, or name another folder, such as a new one below it"
        )
    return path


def private_folder() -> Path:
    """Returns this user's private folder, on tmpfs if the host has one.

    Raises `FolderError` when no folder is usable.
    """
    reasons = []
    for path in _candidates():
        reason = _private(path)
        if not reason:
            return path
        reasons.append(f"{path}: {reason}")
    raise FolderError(f"no private folder for rings ({'; '.join(reasons)}); set UNICOMM_TRACE_DIR to one")


def ring_name(rank: int, pid: int) -> str:
    """Returns a new file name for a ring. `rank` is negative if the process is not a rank of a job."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:48] or "host"
    who = f"rank{rank:05d}" if rank >= 0 else "solo"
    return f"{host}-{who}-{pid}-{secrets.token_hex(4)}{SUFFIX}"


def _process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on; none when there is no such process."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return data[data.rindex(b")") + 2 :].decode().split()  # the process's name is any 15 bytes


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
    """Returns the identity of this process's PID namespace, or "" if it is unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def boot_id() -> str:
    """Returns the identity of this host's last boot, or "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive(path: Path) -> bool | None:
    """Returns whether the process of a ring runs.

    Returns None if that is unknown: the file is not a ring, or its process belongs to another host, to this
    host before its last boot, or to another PID namespace.
    """
    try:
        head = read_file(path, ANYONE, size=96)
        if len(head) < 96 or head[:8] != _MAGIC:
            return None
        if head[28] & CLEAN_CLOSE:
            return False
        begin, length = (int.from_bytes(head[at : at + 8], "little") for at in (80, 88))
        meta = json.loads(read_file(path, ANYONE, at=begin, size=min(length, MOST_META)))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(meta, dict) or is_elsewhere(meta):
        return None
    pid, ticks = int.from_bytes(head[16:20], "little"), int.from_bytes(head[32:40], "little")
    return process_start_ticks(pid) == ticks


def is_elsewhere(meta: Mapping[str, Any]) -> bool:
    """Whether the process that describes itself by `meta` belongs to another host, boot or PID namespace."""
    if meta.get("boot_id") != boot_id():
        return True
    here = pid_namespace()
    return bool(meta.get("pid_namespace", here) != here)


def _is_ring(path: Path) -> bool:
    try:
        return read_file(path, ANYONE, size=8) == _MAGIC
    except OSError:
        return False


def clean(
    folder: Path, max_bytes: int = 256 << 20, max_files: int = 512, max_age_days: float = 3.0
) -> list[Path]:
    """Removes rings of ended processes: those older than `max_age_days`, then the oldest beyond the bounds.

    Rings of running processes, files that are not rings, and those of other users stay. So do rings of other
    hosts and PID namespaces, which were not closed: their processes may be running. They are removed when
    they are as old as ten times `max_age_days`, and the oldest beyond the bounds when they are `max_age_days`
    old. Returns the removed paths.
    """
    found = []
    owners = trusted_owners(folder)
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            info = path.lstat()
        except OSError:
            continue
        if info.st_uid not in owners:
            continue
        if (alive := is_alive(path)) is not None or _is_ring(path):
            found.append((info.st_mtime, info.st_size, path, alive))
    # The rings whose processes are unknown here have bounds of their own.
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for _, size, _, alive in found:
        sizes[alive is None].append(size)
    total, count = ({kind: of(sizes[kind]) for kind in sizes} for of in (sum, len))
    oldest_allowed = time.time() - max_age_days * _DAY
    unknown_allowed = time.time() - 10 * max_age_days * _DAY
    removed = []
    for modified, size, path, alive in sorted(found, key=lambda one: one[:3]):
        unknown = alive is None
        beyond = total[unknown] > max_bytes or count[unknown] > max_files
        if alive or (unknown and modified >= (oldest_allowed if beyond else unknown_allowed)):
            continue
        if modified >= oldest_allowed and not beyond:
            continue
        try:
            path.unlink()
        except OSError:
            continue
        removed.append(path)
        total[unknown] -= size
        count[unknown] -= 1
    for side in folder.glob("*"):  # ending files, which have the name of their ring
        if side.suffix in (".ending", ".stacks") and not side.with_suffix(SUFFIX).exists():
            with contextlib.suppress(OSError):
                if (info := side.lstat()).st_uid not in owners:
                    continue
                if info.st_mtime < oldest_allowed or side.with_suffix(SUFFIX) in removed:
                    side.unlink()
    return removed
