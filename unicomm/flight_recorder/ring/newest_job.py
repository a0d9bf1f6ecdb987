"""The files of the newest job in the folder for rings, which has those of a user's other jobs, too.

Each call of `unicomm run` has a folder there. The rings of all other processes lie side by side. Of these,
the ones that belong together are found by their times: the processes of a job live at the same time, and
each rank is there once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .endings import SUFFIXES as SIDE_FILES
from .files import open_file, trusted_owners
from .folder import SUFFIX, is_alive
from .reader import HEADER, MAGIC

_APART = 60.0  # seconds between the last sign of one rank and the first one of the others, at most
_ATTEMPT = re.compile(r"(?:^|-)(\d+)$")  # how names of folders in that of `unicomm run` end


@dataclass(frozen=True)
class _Life:
    """What a ring's header tells of its process; times in seconds since 1970, `end` inf while it runs."""

    path: Path
    rank: int
    world: int
    start: float
    end: float


def newest_job(folder: Path) -> tuple[list[Path], int]:
    """Returns the files and folders of the newest job, and how many rings of other jobs are in `folder`.

    The newest job is the one that was started last. Without any ring, that is `folder` itself.
    """
    apart: dict[Path, list[_Life]] = {}
    beside: list[_Life] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            apart[path] = list(_lives(path))
        elif path.suffix == SUFFIX:
            beside += _life(path)
    latest = max((life.start for life in beside), default=0.0)
    runs = {path: max(life.start for life in lives) for path, lives in apart.items() if lives}
    total = len(beside) + sum(_count(lives) for lives in apart.values())
    if not beside and not runs:
        return [folder], 0
    if runs and (newest := max(runs, key=lambda path: runs[path])) and runs[newest] >= latest:
        return _last_attempt(newest), total - _count(apart[newest])
    job = _together(beside)
    return _with_side_files(folder, job), total - len(job)


def _life(path: Path) -> list[_Life]:
    """The life of a ring's process; empty if the file is none that this user may trust."""
    try:
        descriptor, _ = open_file(path, trusted_owners(path.parent))
        with open(descriptor, "rb") as file:
            data = file.read(HEADER.itemsize)
    except OSError:
        return []
    if len(data) < HEADER.itemsize or not data.startswith(MAGIC):
        return []
    head = np.frombuffer(data, HEADER, 1)[0]
    end = float("inf") if is_alive(path) else max(int(head["last_real_ns"]), int(head["start_real_ns"])) / 1e9
    return [_Life(path, int(head["rank"]), int(head["world"]), int(head["start_real_ns"]) / 1e9, end)]


def _lives(folder: Path) -> Iterator[_Life]:
    for within, _, names in os.walk(folder):
        for name in names:
            if name.endswith(SUFFIX):
                yield from _life(Path(within, name))


def _count(lives: list[_Life]) -> int:
    """The number of processes: a job's folder has copies of their rings."""
    return len({(life.rank, life.start) for life in lives})


def _last_attempt(run: Path) -> list[Path]:
    """The rings of the last attempt of a job, and the copies of them."""
    attempts: dict[int, list[Path]] = {}
    for path in sorted(run.iterdir()):
        if path.is_dir() and (found := _ATTEMPT.search(path.name)) and any(path.iterdir()):
            attempts.setdefault(int(found[1]), []).append(path)
    return attempts[max(attempts)] if attempts else [run]


def _together(lives: list[_Life]) -> list[_Life]:
    """The rings of the job that was started last."""
    newest = max(lives, key=lambda life: life.start)
    lives = [life for life in lives if life.world == newest.world]
    # A rank that was there before belongs to an earlier job, as does all that began before its end.
    latest = {life.rank: life.start for life in sorted(lives, key=lambda life: life.start) if life.rank >= 0}
    before = max((life.end for life in lives if life.end <= latest.get(life.rank, 0.0)), default=0.0)
    job: list[_Life] = []
    began = newest.start
    for life in sorted(lives, key=lambda life: -life.start):
        if life.start >= before and life.end >= began - (_APART if life.rank >= 0 else 0.0):
            job.append(life)
            began = life.start
    return job


def _with_side_files(folder: Path, job: list[_Life]) -> list[Path]:
    """The rings, their ending files, and what else was written since the first process was started."""
    began = min(life.start for life in job)
    chosen = {life.path.stem for life in job}
    files = [life.path for life in job]
    for path in sorted(folder.iterdir()):
        if path.suffix == SUFFIX or path.name.startswith(".") or path.is_dir():
            continue
        own = path.suffix in SIDE_FILES and path.with_suffix(SUFFIX).exists()
        if path.stem in chosen if own else path.lstat().st_mtime >= began:
            files.append(path)
    return files
