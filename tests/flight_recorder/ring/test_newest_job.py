"""Without a path, commands read the job that was started last, and no rank of another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.flight_recorder.rings import write_ring
from unicomm.flight_recorder.ring.newest_job import newest_job
from unicomm.flight_recorder.ring.reader import HEADER
from unicomm.flight_recorder.table.load import load_job

NOW = time.time()
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the ring of a process that lived from `start` to `end`, in seconds from now."""

    def write(name: str, rank: int, world: int, start: float, end: float, alive: bool = False) -> Path:
        path = tmp_path / f"{name}.ucring"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_ring(path, max(rank, 0), world, 3)
        data = bytearray(path.read_bytes())
        head = np.frombuffer(data, HEADER, 1)
        head["rank"] = rank
        head["start_real_ns"], head["last_real_ns"] = int((NOW + start) * 1e9), int((NOW + end) * 1e9)
        if not alive:
            head["proc_start_ticks"] = 1
        path.write_bytes(data)
        os.utime(path, (NOW + end, NOW + end))
        return path

    return write


def _names(folder: Path) -> tuple[list[str], int]:
    found, others = newest_job(folder)
    return sorted(path.relative_to(folder).as_posix() for path in found), others


def test_ranks_of_a_larger_job_before_do_not_join(tmp_path: Path, write: Write) -> None:
    for rank in range(4):
        write(f"old{rank}", rank, 4, -200, -100)
    for rank in range(2):
        write(f"new{rank}", rank, 2, -50, -20 - rank)
    assert _names(tmp_path) == (["new0.ucring", "new1.ucring"], 4)


def test_an_attempt_of_as_many_ranks_before_does_not_join(tmp_path: Path, write: Write) -> None:
    """Rank 2 of the newer one died before it had a ring: that of the older one must not stand for it."""
    for rank in range(3):
        write(f"old{rank}", rank, 3, -60, -22 - rank)
    for rank in range(2):
        write(f"new{rank}", rank, 3, -20 + rank, -10)
    assert _names(tmp_path) == (["new0.ucring", "new1.ucring"], 3)


def test_a_rank_that_died_early_belongs_to_its_job(tmp_path: Path, write: Write) -> None:
    write("rank1", 1, 3, -100, -99)
    write("rank0", 0, 3, -90, -5)
    write("rank2", 2, 3, -80, -5, alive=True)
    assert _names(tmp_path) == (["rank0.ucring", "rank1.ucring", "rank2.ucring"], 0)


def test_a_job_that_runs_since_long_ago_is_not_the_newest(tmp_path: Path, write: Write) -> None:
    for rank in range(2):
        write(f"long{rank}", rank, 2, -5000, -1, alive=True)
        write(f"short{rank}", rank, 4, -50, -40)
    assert _names(tmp_path) == (["short0.ucring", "short1.ucring"], 2)


def test_processes_that_are_no_ranks_stand_alone_unless_they_overlap(tmp_path: Path, write: Write) -> None:
    write("solo0", -1, 1, -30, -25)
    write("solo1", -1, 1, -20, -10)
    write("solo2", -1, 1, -19, -9)
    assert _names(tmp_path) == (["solo1.ucring", "solo2.ucring"], 1)


def test_the_last_attempt_of_a_run_counts_with_all_that_was_copied(tmp_path: Path, write: Write) -> None:
    write("lone", 0, 1, -500, -400)
    for attempt in (0, 1):
        for rank in range(2):
            for kind in ("", "failed-"):
                start = -100 + 50 * attempt + 20 * rank
                write(f"run-1/{kind}{attempt}/r{rank}", rank, 2, start, start + 1)
    (tmp_path / "run-1" / ".lock").touch()
    assert _names(tmp_path) == (["run-1/1", "run-1/failed-1"], 1)
    assert [s.rank for s in load_job([tmp_path]).sources] == [0, 1]


def test_a_job_beside_the_folder_of_an_older_run(tmp_path: Path, write: Write) -> None:
    write("run-1/0/r0", 0, 2, -100, -90)
    write("lone", 0, 1, -50, -40)
    assert _names(tmp_path) == (["lone.ucring"], 1)


def test_ending_files_come_with_their_rings(tmp_path: Path, write: Write) -> None:
    for name, start in (("old", -100), ("new", -20)):
        write(name, 0, 2, start, start + 5)
        (tmp_path / f"{name}.ending").write_text("{}")
    for name, when in (("before", -90), ("since", -10)):
        dump = tmp_path / f"{name}.pickle"
        dump.touch()
        os.utime(dump, (NOW + when, NOW + when))
    assert _names(tmp_path) == (["new.ending", "new.ucring", "since.pickle"], 1)


def test_an_empty_folder_is_what_is_read(tmp_path: Path) -> None:
    assert newest_job(tmp_path) == ([tmp_path], 0)


@pytest.mark.parametrize(
    "command", [["trace", "analyze", "--json"], ["trace", "export", "--openmetrics", "-"]]
)
def test_commands_without_a_path(tmp_path: Path, write: Write, command: list[str]) -> None:
    for rank in range(4):
        write(f"old{rank}", rank, 4, -200, -100)
    for rank in range(2):
        write(f"new{rank}", rank, 2, -50, -20 - rank)
    done = subprocess.run(
        [sys.executable, "-m", "unicomm", *command],
        check=False,
        env={**os.environ, "UNICOMM_TRACE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if command[1] == "analyze":
        report = json.loads(done.stdout)
        assert (report["input"]["ranks"], report["input"]["present"]) == (2, 2)
    remark = f"left out: 4 rings of other jobs in {tmp_path}"
    assert remark in done.stdout + done.stderr
