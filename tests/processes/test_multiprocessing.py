"""Ranks as children of multiprocessing: their rings go when they end well, and stay when they do not."""

import os
import sys
from pathlib import Path

import pytest

from tests.processes.forked_interpreters import run

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "programs" / "multiprocessed.py"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_ring_of_a_child(tmp_path, method, fails):
    # From a process that has no other threads: what a test worker has gathered is not to be forked.
    tmp_path.chmod(0o700)
    command = [sys.executable, str(PROGRAM), method, str(tmp_path), str(fails)]
    done = run(command)
    assert done.returncode == fails, done.stderr
    assert bool([f for f in os.listdir(tmp_path) if f.endswith(".ucring")]) == fails


def test_a_child_that_ends_without_finalize_is_no_lost_rank(tmp_path):
    """A forked one: rank 1 has sent its message and ends; rank 0 still waits for rank 2, which is alive."""
    tmp_path.chmod(0o700)
    program = PROGRAM.with_name("multiprocessed_ranks.py")
    done = run([sys.executable, str(program), str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2.0", "3.0"]
