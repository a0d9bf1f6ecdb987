"""Where what is built on this machine lies, and how it gets there: see `unicomm build`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class BuildError(RuntimeError):
    """Something cannot be built; the message says why, and the cure."""


def cache_folder() -> Path:
    """The user's cache of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unicomm"


def version_of_files(files: Iterable[Path]) -> str:
    """Changes with the content of any of them."""
    key = hashlib.sha256()
    for path in files:
        key.update(path.read_bytes())
    return key.hexdigest()[:12]


@contextmanager
def building(target: Path) -> Iterator[None]:
    """One of several processes builds `target`, the others wait. Raises `BuildError`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_suffix(".lock").open("w")
    except OSError as error:
        raise _cannot_install(target, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(made: Path, target: Path) -> None:
    """At once: another process may be loading the one before. Raises `BuildError`."""
    try:
        part = target.with_suffix(f".{os.getpid()}.part")
        shutil.copy(made, part)
        part.replace(target)
    except OSError as error:
        raise _cannot_install(target, error) from None


def _cannot_install(target: Path, error: OSError) -> BuildError:
    return BuildError(f"cannot install {target}: {error}; XDG_CACHE_HOME chooses the folder")
