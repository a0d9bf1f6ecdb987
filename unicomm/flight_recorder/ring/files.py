"""Opening files of folders for rings, into which other users may put what they like.

Whoever looks at rings must not be held up by what lies beside them: a FIFO blocks whoever opens it, a device
never ends, a link leads elsewhere. So only regular files of bounded size are opened, without waiting. A file
that was found, and not named by the user, must be no link and belong to somebody who may be trusted
(docs/design/ring-folders.md).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

MOST_BYTES = 4 << 30  # of a ring or dump; the largest ring that UNICOMM_TRACE_RECORDS allows has 3.5 GiB
MOST_SIDE_BYTES = 16 << 20  # of an ending file
ANYONE = range(1 << 32)  # every user id
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnsafeFileError(OSError):
    """A file is not opened; the message says why, and what to do."""


def trusted_owners(folder: Path) -> frozenset[int]:
    """The users whose files in a folder for rings are read: this user and the owner of the folder.

    The folder's owner could replace any file in it. Files on network drives may belong to another user than
    the process that wrote them, and so does the folder then. But where every user may replace the folder
    itself, because of a folder above it, its owner may be anybody, unless it is root.
    """
    owners = {os.geteuid()}
    with contextlib.suppress(OSError):
        owner = folder.stat().st_uid
        if owner == 0 or (owner not in owners and not any(map(anyone_may_remove, folder.resolve().parents))):
            owners.add(owner)
    return frozenset(owners)


def open_file(
    path: Path | str, owners: Collection[int] | None = None, most: int = MOST_BYTES, flags: int = os.O_RDONLY
) -> tuple[int, os.stat_result]:
    """Opens a regular file without waiting. Returns the descriptor and what `os.fstat` says.

    Args:
        owners: the users to whom a file that was found may belong; None for a file that the user has named,
            which may also be a link.
        most: the number of bytes that it may have.

    Raises `UnsafeFileError` when it is not such a file, `OSError` when it cannot be opened.
    """
    # Looked at before, because opening alone has effects on some devices, and afterwards, because another
    # file may have taken its place in between.
    _check(os.stat(path, follow_symlinks=owners is None), owners, most)
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if owners is None else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        info = os.fstat(descriptor)
        _check(info, owners, most)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, info


def _check(info: os.stat_result, owners: Collection[int] | None, most: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(info.st_mode)), "no file")
        raise UnsafeFileError(f"it is {kind}, not a file; name what it stands for to have it read")
    if owners is not None and info.st_uid not in owners:
        raise UnsafeFileError(f"it belongs to user {info.st_uid}; name the file itself to have it read")
    if info.st_size > most:
        raise UnsafeFileError(f"it has {info.st_size} bytes, more than the {most} that are read")


def read_into(descriptor: int, buffer: memoryview) -> int:
    """Fills `buffer` from a file; returns the number of bytes, which is less at the end of the file."""
    got = 0
    while got < len(buffer) and (more := os.readv(descriptor, [buffer[got:]])):
        got += more
    return got


def read_file(
    path: Path | str,
    owners: Collection[int] | None = None,
    most: int = MOST_BYTES,
    at: int = 0,
    size: int = -1,
) -> bytes:
    """Returns `size` bytes of a file from `at` on, by default all that it has now; see `open_file`."""
    descriptor, info = open_file(path, owners, most)
    with open(descriptor, "rb", buffering=0) as file:
        file.seek(at)
        left = max(0, info.st_size - at)
        left = left if size < 0 else min(left, size)
        pieces: list[bytes] = []
        while left and (piece := file.read(left)):
            pieces.append(piece)
            left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def rewrite_own(path: Path, text: str, append: bool = False) -> None:
    """Replaces or extends the text of a file that this user has written, not through a link to another file.

    Raises `OSError`.
    """
    owners = (os.geteuid(),)
    descriptor, info = open_file(path, owners, MOST_SIDE_BYTES, os.O_WRONLY | os.O_APPEND)
    with open(descriptor, "w") as file:
        if info.st_nlink != 1:
            raise UnsafeFileError("it has several names, so it may be another file")
        if not append:
            file.truncate(0)
        file.write(text)


def create_own(path: Path | str, flags: int = os.O_WRONLY) -> int:
    """Creates a file that only this user can read; returns its descriptor. Raises `OSError` if it exists."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def others_may_write(folder: Path) -> bool:
    """Whether users other than the owner may put files into a folder. Raises `OSError`."""
    return bool(folder.stat().st_mode & 0o022)


def anyone_may_remove(folder: Path) -> bool:
    """Whether every user may remove and replace whatever is in a folder. Raises `OSError`.

    With the sticky bit, as in /tmp, only the owner of a file may.
    """
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
