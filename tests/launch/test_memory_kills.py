"""Evidence for kills by the kernel: a real one, in a control group that is too small."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicomm.launch.run import memory_kills
from unicomm.launch.run.memory_kills import MemoryKills

GROUPS = Path("/sys/fs/cgroup/memory")
HOG = """
import sys
sys.stdin.readline()
held = []
while True:
    held.append(bytearray(b"x" * (1 << 20)))
"""


@pytest.fixture
def hog():
    """A process in a control group of 64 MiB that fills its memory when it is told to."""
    if not os.access(GROUPS, os.W_OK):
        pytest.skip("needs control groups of version 1 for memory, and the right to make some")
    group = GROUPS / f"unicomm-test-{os.getpid()}"
    group.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE)
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        until = time.monotonic() + 10
        while group.exists() and time.monotonic() < until:
            try:
                group.rmdir()
            except OSError:  # the kernel still cleans up
                time.sleep(0.05)


def end_of(process):
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT).si_status


@pytest.mark.parametrize("log", ["the kernel's log", "the counter alone"])
def test_a_kill_by_the_kernel(hog, monkeypatch, log):
    if log == "the counter alone":
        monkeypatch.setattr(memory_kills, "_LOG", "/no/such/log")
    kills = MemoryKills()
    kills.watch([hog.pid])
    assert kills.evidence(hog.pid) == ""
    hog.stdin.write(b"go on\n")
    hog.stdin.flush()
    assert end_of(hog) == signal.SIGKILL
    kills.watch([hog.pid])  # as the launcher does in the same look
    assert "memory" in kills.evidence(hog.pid)
    kills.close()


def test_another_kill_is_no_evidence(hog):
    kills = MemoryKills()
    kills.watch([hog.pid])
    hog.kill()
    assert end_of(hog) == signal.SIGKILL
    kills.watch([hog.pid])
    assert kills.evidence(hog.pid) == ""
    kills.close()
