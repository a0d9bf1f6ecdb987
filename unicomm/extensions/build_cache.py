"""The user's cache of parts that `unicomm build` has compiled, and how files are installed there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """A part cannot be built. The message says why, and what to do."""


def cache_folder() -> Path:
    """Returns the user's cache folder of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unicomm"


def version_of_files(files: Iterable[Path]) -> str:
    """Returns a hash of the files' content."""
    key = hashlib.sha256()
    for path in files:
        key.update(path.read_bytes())
    return key.hexdigest()[:12]


@contextmanager
def building(target: Path) -> Iterator[None]:
    """Holds the lock for building `target`; other processes wait. Raises `BuildError`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_suffix(".lock").open("w")
    except OSError as error:
        raise _cannot_install(target, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(built: Path, target: Path) -> None:
    """Copies a built file to `target` atomically, as another process may load it. Raises `BuildError`."""
    try:
        part = target.with_suffix(f".{os.getpid()}.part")
        shutil.copy(built, part)
        part.replace(target)
    except OSError as error:
        raise _cannot_install(target, error) from None


def _cannot_install(target: Path, error: OSError) -> BuildError:
    return BuildError(f"cannot install {target}: {error}; XDG_CACHE_HOME chooses the folder")
