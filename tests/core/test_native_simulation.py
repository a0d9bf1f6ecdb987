"""The shared-memory core in virtual time: docs/design/simulation.md."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "csrc" / "tests" / "simulation" / "regressions.txt"
BUILD = ROOT / "build" / "simulate"  # that of `make simulate`
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find(*names: str) -> str:
    for name in names:
        if path := shutil.which(name, path=TOOLS):
            return path
    pytest.skip(f"not installed: {' or '.join(names)}")


@pytest.fixture(scope="module")
def simulate():
    """Builds the simulation, if it is not up to date, and returns a function that runs it."""
    find(os.environ.get("CXX", ""), "c++", "g++", "clang++")
    cmake, ninja = find("cmake"), find("ninja")
    BUILD.mkdir(parents=True, exist_ok=True)
    options = [
        f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DUNICOMM_SIMULATION=ON",
    ]
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes builds
        for command in (
            [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *options],
            [cmake, "--build", str(BUILD), "--target", "native_simulate"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    def run(*options: str) -> subprocess.CompletedProcess:
        command = [str(BUILD / "native_simulate"), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    return run


pytestmark = pytest.mark.timeout(1800)  # the build, on a busy machine


def test_cases_that_failed_once_hold(simulate):
    done = simulate("--deaths", "--regressions", str(CASES))
    assert done.returncode == 0, done.stdout + done.stderr
    listed = [line for line in CASES.read_text().splitlines() if line and not line.startswith("#")]
    assert f"regressions: {len(listed)} cases, 0 failed" in done.stdout


def test_seeds_of_this_code_hold(simulate):
    """Other seeds after each change of the core, and the same ones in all runs on the same code."""
    code = hashlib.sha256()
    for file in sorted((ROOT / "csrc").rglob("*.?pp")):
        code.update(file.read_bytes())
    first = int.from_bytes(code.digest()[:6], "little")
    done = simulate("--deaths", "--seeds", "2000", "--first", str(first))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "simulated 2000 programs" in done.stdout


def test_a_seed_replays_exactly(simulate):
    for seed, how in ((1, "--trace"), (8, "--trace"), (268, "--points")):
        once, again = simulate("--seed", str(seed), how), simulate("--seed", str(seed), how)
        assert once.returncode == 0
        assert once.stdout == again.stdout
        case = re.search(r"^case: (.*)$", once.stdout, re.M)[1]
        assert simulate("--case", case, how).stdout == once.stdout


def test_a_trace_names_rank_operation_and_place(simulate):
    lines = simulate("--seed", "268", "--trace").stdout.splitlines()
    ends = "sleeps|yields|is preempted|pauses|returns"
    at = rf" +\d+\.\d{{3}} ms  rank \d .* points  \w+ at \w+, \S*:\d+  ({ends})"
    assert sum(bool(re.match(at, line)) for line in lines) > 20


def test_a_planted_defect_is_found_and_shrunk(simulate):
    """With a clock that stands still no deadline passes: ranks that wait for a missing one never end."""
    done = simulate("--seeds", "2", "--frozen")
    assert done.returncode == 1
    assert "FAILED seed" in done.stdout
    cases = re.findall(r"^shrunk to: virtual time is used up\n(?:.*\n)*?case: (.*)$", done.stdout, re.M)
    assert cases
    for case in cases:
        assert case.count(" op=") <= 2
        assert case.count(" cause=") == 1
        replayed = simulate("--case", case)
        assert replayed.returncode == 1
        assert "FAILED end: virtual time is used up" in replayed.stdout
        assert simulate("--case", case.replace(" frozen=1", "")).returncode == 0


def test_a_damaged_case_is_refused(simulate):
    done = simulate("--case", "world=4 op=barrier,1,0,0")
    assert done.returncode == 2
    assert "damaged word" in done.stderr
