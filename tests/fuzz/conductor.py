"""`make fuzz`: fuzzes the targets for some minutes each, and keeps what breaks a promise.

    python -m tests.fuzz.conductor --minutes 10
    python -m tests.fuzz.conductor --target rings --target dumps --seed 7
    python -m tests.fuzz.conductor --again tests/fuzz/corpus/rings/0123456789ab     # one input again

An input that breaks a promise is minimised and written to tests/fuzz/corpus/TARGET, where the suite finds it.
The inputs that reached new code stay in build/fuzz, and later calls begin with them; `--fresh` begins anew.
The exit code is 0 when all promises were kept, 1 when one was broken, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests import ROOT
from tests.commands import clean_environment
from tests.fuzz.minimise import minimise
from tests.fuzz.targets import PLANTED, TARGETS, Room

CORPUS = Path(__file__).with_name("corpus")
_WORK = ROOT / "build" / "fuzz"
_LONGEST = 1 << 16  # bytes of an input
_SLOWEST = 120  # seconds after which an input counts as endless: a busy machine may stop the process
_MOST_MEMORY = 4096  # MiB of the process
_IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
_STEP = re.compile(r"^#(\d+)\s.*?(?:cov: (\d+))?(?:\s.*)?$")
_PROGRESS = 15.0  # seconds between two lines of progress


@dataclass
class Run:
    """A fuzzed target: the number of its inputs, the branches that they reached, and the seconds it took.

    `found` are inputs that broke a promise; `ended` says how the process ended if not as it should.
    """

    target: str
    inputs: int = 0
    coverage: int = 0
    seconds: float = 0.0
    found: list[Path] = field(default_factory=list)
    ended: str = ""

    @property
    def per_minute(self) -> float:
        return 60 * self.inputs / max(self.seconds, 0.001)


def make_seeds(folder: Path) -> Path:
    """Writes the seeds into a new folder, by a process that may import what it likes."""
    command = [sys.executable, "-m", "tests.fuzz.seeds", str(folder)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True, timeout=300)
    return folder


def fuzz(
    target: str,
    seeds: Path,
    work: Path,
    seconds: float,
    seed: int = 0,
    tell: Callable[[Run], None] = lambda run: None,
    more: Sequence[str] = (),
    planted: bool = False,
) -> Run:
    """Fuzzes one target in a process of its own; its files lie in `work`.

    `seed`: 0 for a random one; `more`: options of libFuzzer; `planted`: reads with a defect (targets.py).
    """
    grown, found = work / "grown" / target, work / "found" / target
    for folder in (grown, found):
        folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.fuzzer", target, str(seeds), str(grown), str(found)]
    command += [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-max_len={_LONGEST}"]
    command += [
        f"-timeout={_SLOWEST}",
        f"-rss_limit_mb={_MOST_MEMORY}",
        "-report_slow_units=1000",
        "-print_final_stats=1",
        *more,
    ]
    run, began = Run(target), time.monotonic()
    before, lines = set(found.iterdir()), list[str]()
    with (
        tempfile.TemporaryDirectory(prefix="unicomm-fuzz-", dir=_IN_MEMORY) as place,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment() | {"TMPDIR": place, PLANTED: "1" if planted else ""},
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if step := _STEP.match(line):
                run.inputs = int(step[1])
                run.coverage = int(cov[1]) if (cov := re.search(r"cov: (\d+)", line)) else run.coverage
                run.seconds = time.monotonic() - began
                tell(run)
            elif line.startswith("stat::number_of_executed_units:"):
                run.inputs = int(line.split()[1])
    run.seconds = time.monotonic() - began
    run.found = sorted(path for path in set(found.iterdir()) - before if path.suffix != ".txt")
    if process.returncode:
        run.ended = f"exit code {process.returncode}\n" + "".join(lines[-30:])
    return run


def keep(run: Run, room: Room, corpus: Path = CORPUS) -> list[str]:
    """Minimises what a run has found, and writes it into `corpus`; returns a line for each input."""
    out = []
    for path in run.found:
        data, what = minimise(TARGETS[run.target], room, path.read_bytes())
        kept = corpus / run.target / path.name.rsplit("-", 1)[-1][:12]
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
        out.append(f"{kept}: {what or 'not again; the machine may have been too busy'} ({len(data)} bytes)")
    return out


def _again(path: Path, seeds: Path) -> int:
    """Reads one input again, in this process."""
    target = path.parent.name
    with Room(seeds) as room:
        TARGETS[target](room, path.read_bytes(), every=True)
    print(f"{path}: {target} keeps its promises")
    return 0


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="for each target (default: 2)")
    parser.add_argument(
        "--target", action="append", choices=sorted(TARGETS), help="may be repeated; default: all"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random changes; default: another one each time"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="targets at the same time"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the inputs of earlier calls")
    parser.add_argument("--again", type=Path, metavar="FILE", help="read one file of corpus/ again, and end")
    options = parser.parse_args(words)
    shutil.rmtree(_WORK if options.fresh else _WORK / "seeds", ignore_errors=True)
    seeds = make_seeds(_WORK / "seeds")
    if options.again is not None:
        return _again(options.again, seeds)
    shown: dict[str, float] = {}

    def tell(run: Run) -> None:
        if run.seconds - shown.get(run.target, -_PROGRESS) >= _PROGRESS:
            shown[run.target] = run.seconds
            print(
                f"{run.target:<9} {run.seconds:5.0f} s {run.inputs:8} inputs, {run.coverage} branches",
                flush=True,
            )

    def one(target: str) -> Run:
        return fuzz(target, seeds, _WORK, options.minutes * 60, options.seed, tell)

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(one, options.target or TARGETS))
    print(f"\n{'target':<9} {'inputs':>8} {'a minute':>9} {'branches':>9} found")
    for run in runs:
        print(f"{run.target:<9} {run.inputs:8} {run.per_minute:9.0f} {run.coverage:9} {len(run.found)}")
    with Room(seeds) as room:
        for run in runs:
            print(*keep(run, room), *filter(None, [run.ended]), sep="\n", end="")
    return int(any(run.found or run.ended for run in runs))


if __name__ == "__main__":
    sys.exit(main())
