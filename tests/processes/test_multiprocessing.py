"""Ranks as children of multiprocessing: their rings go when they end well, and stay when they do not."""

import os
import sys
from pathlib import Path

import pytest

from tests.commands import run

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
