"""Random legal programs as real processes, whose rings are analyzed: no finding is allowed.

    python -m tests.healthy.conductor --runs 500
    python -m tests.healthy.conductor --seed 1234 --runs 1     # one program again
    python -m tests.healthy.conductor --log runs.jsonl         # in pieces: goes on where it stopped

Each run is a job of 2 to 4 ranks over shm or gloo with several groups, whose program follows from its seed.
It is analyzed four times: in the middle of its program, when all its operations are over and the processes
live, after they have ended, and as dumps in torch's format. The exit code is 0 without a finding, 1 with one,
2 for wrong arguments. A run with a finding leaves its rings in build/healthy.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests import ROOT
from tests.commands import clean_environment
from tests.healthy.legal import Program
from tests.processes.rank_processes import ForkServer, Job, agent_environments, new_store
from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.formats.torch_dump import to_dict
from unicomm.flight_recorder.ring.reader import Ring
from unicomm.flight_recorder.table.load import load

KEPT = ROOT / "build" / "healthy"
WITHIN = 120.0  # seconds for half a program: a hang, not a slow machine
RANK = Path(__file__).with_name("rank.py")


@dataclass
class Run:
    """One run: its program and what the analyses found, as (moment, verdict, culprits, sentence)."""

    seed: int
    size: int
    backend: str
    groups: int
    analyses: int = 0
    operations: int = 0
    seconds: float = 0.0
    findings: list[tuple[str, str, list[int], str]] = field(default_factory=list)

    def judge(self, moment: str, report: Report) -> None:
        """Adds the findings of an analysis."""
        self.analyses += 1
        self.operations = max(self.operations, report.entries)
        complete = report.present == self.size
        if not complete:
            self.findings.append((moment, "no ring of some ranks", report.missing, ""))
        if not report.good:
            self.findings += [(moment, f.verdict.value, f.culprits, f.sentence) for f in report.findings]


def play(server: ForkServer, seed: int, kept: Path = KEPT) -> Run:
    """Runs the program of a seed and analyzes it; keeps the rings in `kept` if there is a finding."""
    began = time.monotonic()
    program = Program.of(seed)
    run = Run(seed, program.size, program.backend, len(program.groups))
    with tempfile.TemporaryDirectory(prefix="healthy-") as name:
        rings = Path(name, "rings")
        rings.mkdir(mode=0o700)
        base = clean_environment() | {"UNICOMM_TRACE_DIR": str(rings), "UNICOMM_TRACE_KEEP": "always"}
        base |= {"PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)}
        store = new_store()
        with Job(server, str(RANK), [str(seed)], agent_environments(program.size, store, base), store) as job:
            job.next("running", WITHIN)
            run.judge("running", analyze(load([rings])))
            job.next("over", WITHIN)
            run.judge("over", analyze(load([rings])))
            job.tell()
            codes = [process.end(WITHIN) for process in job.ranks]
        if any(codes):
            run.findings.append(("end", f"exit codes {codes}", [], ""))
        run.judge("ended", analyze(load([rings])))
        dumps = Path(name, "dumps")
        dumps.mkdir()
        for file in rings.glob("*.ucring"):
            ring = Ring(file.read_bytes(), str(file))
            (dumps / f"rank_{ring.rank}").write_bytes(pickle.dumps(to_dict(ring)))
        run.judge("dumps", analyze(load([dumps])))
        if run.findings:
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copytree(name, kept / f"seed{seed}", dirs_exist_ok=True)
    run.seconds = time.monotonic() - began
    return run


def play_all(seeds: Iterator[int] | range, log: Path | None) -> list[Run]:
    """Plays the programs of the seeds that `log` does not have yet."""
    runs: list[Run] = []
    if log is not None and log.exists():
        runs = [Run(**json.loads(line)) for line in log.read_text().splitlines()]
    known = {run.seed for run in runs}
    server = ForkServer()
    try:
        for seed in seeds:
            if seed in known:
                continue
            run = play(server, seed)
            runs.append(run)
            for moment, verdict, culprits, sentence in run.findings:
                what = f"{moment}: {verdict} {culprits} {sentence}"
                print(f"seed {seed} ({run.backend}, {run.size} ranks), {what}")
            sys.stdout.flush()
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
    finally:
        server.close()
    return runs


def summary(runs: list[Run]) -> str:
    """Returns the figures of some runs."""
    by_backend = Counter(run.backend for run in runs)
    found = [run for run in runs if run.findings]
    return (
        f"{len(runs)} runs ({', '.join(f'{n} over {name}' for name, n in sorted(by_backend.items()))}),"
        f" {sum(run.analyses for run in runs)} analyses, {sum(run.operations for run in runs)} operations,"
        f" {sum(run.seconds for run in runs):.0f} s: {len(found)} runs with a finding"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random legal programs, in which nothing may be found.")
    parser.add_argument("--runs", type=int, default=500, help="how many (500)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run (1); the next ones follow")
    parser.add_argument("--log", type=Path, help="a file of the runs so far, to which new ones are added")
    options = parser.parse_args(arguments)
    runs = play_all(range(options.seed, options.seed + options.runs), options.log)
    print(summary(runs))
    return 1 if any(run.findings for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
