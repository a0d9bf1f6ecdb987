"""`unicomm trace analyze` beside torch's own analyzer on the same files, and the growth of its time.

    python -m benchmarks.trace_analyze [--full] [--json result.json]

Each run is a process of its own; seconds are wall clock from start to end, memory is its peak resident set.
The files (benchmarks/trace_dumps.py writes them) have been read once before, so that both find them in
memory. By default the sizes are small enough for a minute or two; --full takes 2048 ranks of torch's pickles
(torch's analyzer needs minutes there) and 16384 ranks of our own rings (about 11 GB of files).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.trace_dumps import Job, generate

ENTRIES = 2000


@dataclass
class Run:
    """One process."""

    what: str
    ranks: int
    entries: int
    seconds: float
    mib: float


def measure(what: str, job: Job, command: list[str], code: int, expected: str = "") -> Run:
    """Runs a command and checks its exit code, and that it said what it must say of these files."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if process.returncode != code or expected not in said:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode} and said:\n{said[-2000:]}")
    run = Run(what, job.ranks, job.entries, seconds, usage.ru_maxrss / 1024)
    print(f"{what:>24}  {job.ranks:>6} x {job.entries:<5} {seconds:9.2f} s {run.mib:9.0f} MiB", flush=True)
    return run


def ours(job: Job, form: str) -> Run:
    command = [sys.executable, "-m", "unicomm", "trace", "analyze", str(job.folder)]
    expected = (0, "All good") if job.guilty < 0 else (1, "never-joined")
    return measure(f"unicomm, {form}", job, command, *expected)


def torchs(job: Job) -> Run:
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(job.folder), "-p", "rank_"]
    return measure("torchfrtrace, pickle", job, command, 0)


class Files:
    """Generates one job after the other in a folder that is emptied between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, ranks: int, entries: int, form: str, guilty: int = -1) -> Job:
        shutil.rmtree(self._folder, ignore_errors=True)
        job = Job(self._folder, ranks, entries, guilty)
        generate(job, form)
        for path in self._folder.iterdir():
            path.read_bytes()
        return job


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="the sizes of the targets")
    parser.add_argument("--ranks", type=int, help="ranks of torch's pickles")
    parser.add_argument("--without-torch", action="store_true", help="leave torch's analyzer out")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        files = Files(Path(folder, "dumps"))
        job = files.make(given.ranks or (2048 if given.full else 256), ENTRIES, "pickle")
        runs.append(ours(job, "pickle"))
        if not given.without_torch:
            runs.append(torchs(job))
            ratio, memory = runs[1].seconds / runs[0].seconds, runs[1].mib / runs[0].mib
            print(f"{'':>24}  {ratio:.0f} times faster, {memory:.1f} times less memory")
        entries = ENTRIES if given.full else 100
        sizes = (64, 256, 1024, 4096, 16384) if given.full else (64, 256, 1024, 4096)
        growth = [ours(files.make(ranks, entries, "ring", guilty=ranks // 3), "ring") for ranks in sizes]
        runs += growth
        for run in growth[2:]:
            each = (run.seconds - growth[0].seconds) / (run.ranks - growth[0].ranks) * 1e3
            print(f"{'':>24}  {run.ranks:>6} ranks: {each:.2f} ms for each further rank")
    if given.json:
        given.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
