"""Runs torch's tests of torch.distributed on stock Gloo and with the switch, each in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import ROOT
from tests.compat.outcomes import Log, Note, Outcome, environment

PLACES = ("stock", "shm", "gloo")
RANKS = 3
MORE_RANKS = {4: "world size of 4", 8: "small world size"}  # the reason why a test skips three ranks
DEADLINE = 450.0  # seconds for one test; torch's own deadlines, which are shorter, show where the ranks are
WORKER = ["-m", "tests.compat.worker"]
ACCIDENTS = 10  # tests
TEST_DEADLINE = "100"  # torch's for most tests


def _environment(place: str, ranks: int, start: str) -> dict[str, str]:
    return environment(place) | {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "INIT_METHOD": "file:///chosen/for/each/test",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": TEST_DEADLINE,
        "COMPAT_START": start,
    }


def run_tests(place: str, ranks: int, start: str, tests: Sequence[str]) -> Iterator[Outcome]:
    """Runs tests one by one and yields the outcome of each. One that hangs or ends its process fails."""
    left = list(tests)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            log.touch()
            command = [sys.executable, *WORKER, str(log), *left]
            env = _environment(place, ranks, start) | {"TMPDIR": folder}  # tests leave files there
            with Path(folder, "output").open("w+") as output:
                worker = subprocess.Popen(
                    command, env=env, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
                )
                try:
                    for found in _outcomes(worker, log):
                        left.remove(found["test"])
                        yield found
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(worker.pid, signal.SIGKILL)
                    worker.wait()
                output.seek(0)
                if left:
                    said = output.read()[-3000:]
                    yield {
                        "test": left.pop(0),
                        "seconds": 0.0,
                        "outcome": "failed",
                        "error": f"the process of the tests ended with code {worker.returncode}\n{said}",
                    }


def _outcomes(worker: subprocess.Popen[bytes], log: Path) -> Iterator[Outcome]:
    last = time.monotonic()
    with log.open() as lines:
        while time.monotonic() - last < DEADLINE:
            over = worker.poll() is not None
            while (line := lines.readline()).endswith("\n"):
                last = time.monotonic()
                yield json.loads(line)
            lines.seek(lines.tell() - len(line))
            if over:
                return
            time.sleep(0.1)


def all_tests() -> list[str]:
    command = [sys.executable, *WORKER]
    env = _environment("stock", RANKS, "fork")
    done = subprocess.run(
        command, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    return done.stdout.split()


def compare(log: Log, tests: Sequence[str], again: bool, note: Note) -> None:
    """Runs what the log lacks: all tests on stock, and those that pass there with the switch.

    Ranks are forked, which takes a tenth of the time. If `again`, tests that fail are run again with ranks
    that are spawned, as torch's own CI does, and the second outcome counts; unless so many fail that it is no
    accident.
    """
    for ranks in (RANKS, *MORE_RANKS):
        wanted = list(tests)
        if ranks != RANKS:
            wanted = [t for t in tests if MORE_RANKS[ranks] in log.found["stock", RANKS, t]["error"]]
        for place in PLACES:
            if place != "stock":
                wanted = [t for t in log.tests("stock", ranks, "passed") if t in tests]
            missing = [t for t in wanted if (place, ranks, t) not in log.found]
            for start in ("fork", "spawn"):
                these = missing if start == "fork" else failed(log, place, ranks, missing)
                if not these or (start == "spawn" and (not again or len(these) > ACCIDENTS)):
                    continue
                say = note(f"{place}, {ranks} ranks{', again' if start == 'spawn' else ''}", len(these))
                for found in run_tests(place, ranks, start, these):
                    one = {"place": place, "ranks": ranks, "start": start} | found | killed(place, found)
                    log.add(one)
                    say(one)


def killed(place: str, found: Outcome) -> Outcome:
    """A test fails with the switch if a signal ended a rank; torch itself looks at rank 0 only."""
    signals = {
        r: -code for r, code in enumerate(found.get("exit codes", [])) if code is not None and code < 0
    }
    if place == "stock" or found["outcome"] != "passed" or not signals:
        return {}
    return {"outcome": "failed", "error": "; ".join(f"signal {s} ended rank {r}" for r, s in signals.items())}


def failed(log: Log, place: str, ranks: int, tests: Sequence[str]) -> list[str]:
    return [t for t in tests if log.found[place, ranks, t]["outcome"] == "failed"]
