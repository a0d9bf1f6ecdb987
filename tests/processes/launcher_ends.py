"""The end of `unicomm run`, many times under load: the exit code, the verdict file, and that nothing is left.

    python -m tests.processes.launcher_ends --repeat 200 --jobs 3 --load 2

Launchers are real processes: forks of a server that has imported torch, or with `--fresh`, interpreters from
scratch, which may be hit by a signal while they import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.commands import clean_environment
from tests.processes.rank_processes import PROGRAMS, ForkServer, RankProcess

WITHIN = 120.0  # a hang, not a slow machine
RANKS = 2
_BAD = ("terminate called", "Fatal Python error", "Exception ignored", "Segmentation fault")


class Launcher:
    """One run of `unicomm run` in a folder of its own. `arguments` may contain {folder}."""

    def __init__(self, server: ForkServer | None, folder: Path, arguments: list[Any]) -> None:
        self.folder, self.file = folder, folder / "verdict.json"
        folder.mkdir(parents=True)
        env = clean_environment() | {"UNICOMM_TRACE_DIR": str(folder / "rings")}
        options = [f"--nproc-per-node={RANKS}", "--hub-port=0", f"--verdict-file={self.file}"]
        argv = [*options, *(str(a).format(folder=folder) for a in arguments)]
        self._text: Callable[[], str]
        if server is not None:
            process = RankProcess(server, [str(PROGRAMS / "unicomm_run.py"), *argv], env, 0)
            self.pid, self.end = process.pid, lambda: process.end(WITHIN)
            self._text = lambda: process.complaints
        else:
            with (folder / "output").open("wb") as output:
                fresh = subprocess.Popen(
                    [sys.executable, "-m", "unicomm", "run", *argv],
                    env=env,
                    cwd=ROOT,
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            self.pid, self.end = fresh.pid, lambda: fresh.wait(WITHIN)
            self._text = (folder / "output").read_text

    @property
    def said(self) -> str:
        return self._text()

    def listens(self) -> bool:
        """Whether it has begun to record signals: Python itself leaves SIGTERM alone."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            return bool(caught >> (signal.SIGTERM - 1) & 1)
        return False

    def ranks(self) -> list[int]:
        """The pids of the ranks that have been there."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob("rank-*")]

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WITHIN
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"not within {WITHIN:g} s; {self.said}")
            time.sleep(0.002)

    def signal(self, number: int) -> None:
        """As a terminal or `timeout` does it: to the process group."""
        os.killpg(self.pid, number)

    def left(self) -> list[str]:
        """Processes of this run that are still there: ranks and hub."""
        mark = f"UNICOMM_TRACE_DIR={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "environ").read_bytes() and int(path.name) != self.pid:
                    found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@dataclass
class Case:
    """Arguments of the launcher, what is done to it, and the exit code and the end that must come of it."""

    arguments: list[Any]
    exit_code: int
    ended: str
    do: Callable[[Launcher, random.Random], None] = lambda launcher, chance: None
    text: str = ""
    quiet: bool = False  # no traceback


def _stop(number: signal.Signals) -> Callable[[Launcher, random.Random], None]:
    """Sends a signal at any moment, and again within 10 ms in half of the runs."""

    def do(launcher: Launcher, chance: random.Random) -> None:
        launcher.until(launcher.listens)
        if chance.random() < 0.5:
            launcher.until(lambda: len(launcher.ranks()) == RANKS)
        time.sleep(chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 2.0))))
        launcher.signal(number)
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.01))
            with contextlib.suppress(ProcessLookupError):
                launcher.signal(number)

    return do


_LAUNCHED = PROGRAMS / "launched.py"
_SLEEP = [_LAUNCHED, "{folder}", "sleep"]
CASES = {
    "wrong-file": Case([PROGRAMS / "nonesuch.py"], 2, "rank-failed", text="can't open file"),
    "raises": Case([_LAUNCHED, "{folder}", "raise"], 1, "rank-failed", text="ValueError: at once"),
    "sigterm": Case(
        _SLEEP, 128 + 15, "stopped", _stop(signal.SIGTERM), "the launcher was stopped by SIGTERM", quiet=True
    ),
    "ctrl-c": Case(
        _SLEEP, 128 + 2, "stopped", _stop(signal.SIGINT), "the launcher was stopped by SIGINT", quiet=True
    ),
}


@dataclass
class Result:
    """What one run has come to."""

    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def play(server: ForkServer | None, folder: Path, case: Case, chance: random.Random) -> Result:
    """Runs one case; all that is not as it must be is a problem."""
    launcher, result = Launcher(server, folder, case.arguments), Result()
    try:
        case.do(launcher, chance)
        began = time.monotonic()
        code = launcher.end()
        result.seconds = time.monotonic() - began
    except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
        with contextlib.suppress(OSError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.end()
        return Result([f"{type(error).__name__}: {error}", launcher.said])
    said = launcher.said
    told = json.loads(launcher.file.read_text()) if launcher.file.exists() else {}
    result.problems += [f"says '{bad}'" for bad in _BAD if bad in said]
    if case.quiet and "Traceback" in said:
        result.problems.append("prints a traceback")
    if code != case.exit_code:
        result.problems.append(f"exit code {code} instead of {case.exit_code}")
    if (told.get("exit_code"), told.get("ended")) != (case.exit_code, case.ended):
        result.problems.append(f"verdict file {told.get('exit_code')}, {told.get('ended')}")
    if case.text not in said:
        result.problems.append(f"does not say '{case.text}'")
    end = time.monotonic() + 5.0  # a rank that was ended may need a moment to be gone
    while (left := launcher.left()) and time.monotonic() < end:
        time.sleep(0.05)
    result.problems += [f"leaves {one}" for one in left]
    if result.problems:
        result.problems.append(said)
    return result


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keeps this number of processes busy, at a low priority."""
    busy = [
        subprocess.Popen(["nice", "-n", "10", sys.executable, "-c", "while True: pass"])
        for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="unicomm-ends-"))
    servers: queue.SimpleQueue[ForkServer | None] = queue.SimpleQueue()  # one answers one at a time
    for _ in range(options.jobs):
        servers.put(None if options.fresh else ForkServer())
    wrong = 0

    def one(name: str, number: int) -> Result:
        chance = random.Random(f"{options.seed} {name} {number}")
        folder, server = base / f"{name}-{number}", servers.get()
        try:
            return play(server, folder, CASES[name], chance)
        finally:
            servers.put(server)
            shutil.rmtree(folder, ignore_errors=True)

    with load(options.load), ThreadPoolExecutor(options.jobs) as pool:
        for name in options.case or CASES:
            results = list(pool.map(lambda number, name=name: one(name, number), range(options.repeat)))
            bad = [result for result in results if result.problems]
            wrong += len(bad)
            seconds = sorted(result.seconds for result in results)
            print(
                f"{name}: {len(results) - len(bad)} of {len(results)} right; from the last signal to the end"
                f" {seconds[len(seconds) // 2]:.2f} s (median), {seconds[-1]:.2f} s (maximum)",
                flush=True,
            )
            for problem, times in Counter("\n".join(result.problems) for result in bad).most_common(3):
                print(f"  {times} times: {problem}", flush=True)
    while not servers.empty():
        if (server := servers.get()) is not None:
            server.close()
    shutil.rmtree(base, ignore_errors=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
