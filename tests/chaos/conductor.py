"""Rounds of random operations in which ranks are killed, stopped, paused or leave.

    python tests/chaos/conductor.py --rounds 500            # writes docs/chaos.md with --write
    python tests/chaos/conductor.py --seed 1234 --rounds 1  # one round again

Everything of a round but the moment follows from its seed: the program, the fault, its victim and its step.
When within the step it strikes depends on the machine too. After each round every rank that lives must have
had the right data or the right class of error, with the victim among its culprits, in time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from program import Spec, main
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).parent.parent.parent
STEPS = 30
PATIENT = 60.0  # seconds: the timeout of operations where none is meant to pass
SHORT = 2.0  # and where one is
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["program"])

#: What becomes of the others: the class of the error that all ranks get which go on.
FAULTS = {
    "none": "right",
    "pause": "right",
    "kill": "PeerLostError",
    "kill two": "PeerLostError",
    "leave": "PeerLostError",
    "stop": "CommTimeoutError",
    "abort": "AbortedError",
    "no descriptors": "PeerLostError",
}


@dataclass
class Round:
    seed: int
    size: int
    backend: str
    fault: str
    victims: list[int]
    at: int  # step
    delay: float  # seconds into the step

    @classmethod
    def of(cls, seed: int, sizes: list[int], backends: list[str], faults: list[str]) -> Round:
        rng = random.Random(seed)
        size, fault = rng.choice(sizes), rng.choice(faults)
        victims = rng.sample(range(size), 2 if fault == "kill two" else 1)
        return cls(
            seed, size, rng.choice(backends), fault, victims, rng.randrange(STEPS), rng.random() * 0.006
        )

    def spec(self, rank: int, port: int, folder: str) -> Spec:
        spec = Spec(
            seed=self.seed,
            rank=rank,
            size=self.size,
            backend=self.backend,
            steps=STEPS,
            timeout=SHORT if self.fault == "stop" else PATIENT,
            port=port,
            prefix=f"round{self.seed}-{time.monotonic_ns()}",
            folder=folder,
            starve_at=self.at if self.fault == "no descriptors" else -1,
        )
        if rank not in self.victims:
            return spec
        return replace(
            spec,
            abort_at=self.at if self.fault == "abort" else -1,
            leave_at=self.at if self.fault == "leave" else -1,
            starve_me=self.fault == "no descriptors",
        )


@dataclass
class Seen:
    """What became of a rank."""

    step: int = -1
    outcome: str = ""
    culprits: list[int] = field(default_factory=list)
    text: str = ""
    when: float = 0.0


class Play:
    """One round, played."""

    def __init__(self, plan: Round, store: Any, folder: Path, limit: float = 45.0) -> None:
        self.plan, self.limit = plan, limit
        self.seen = [Seen() for _ in range(plan.size)]
        self.struck = 0.0
        self.processes: list[Any] = []
        self.links: list[Connection] = []
        specs = [plan.spec(rank, store.port, str(folder)) for rank in range(plan.size)]
        for spec in specs:
            mine, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=main, args=(replace(spec, prefix=specs[0].prefix), theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.links.append(mine)

    def run(self) -> list[str]:
        """Returns what was wrong."""
        try:
            self._watch()
        finally:
            alive = [r for r, p in enumerate(self.processes) if p.is_alive()]
            for r in alive:
                self.processes[r].join(0 if self.seen[r].outcome == "" else 10)
            hung = [r for r in alive if self.processes[r].is_alive()]
            for r in hung:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[r].pid, signal.SIGCONT)
                self.processes[r].kill()
                self.processes[r].join()
        return [f"rank {r} did not end" for r in hung] + self._judge()

    def _watch(self) -> None:
        """Reads what the ranks say, and strikes when the time has come."""
        end = time.monotonic() + self.limit
        strike_at = resume_at = float("inf")
        by_link = {link: r for r, link in enumerate(self.links)}
        struck = set()
        while by_link and (now := time.monotonic()) < end:
            if now >= strike_at:
                self._strike()
                strike_at = float("inf")
                struck = set(self.plan.victims)
                if self.plan.fault in ("pause", "stop"):
                    resume_at = now + (0.3 if self.plan.fault == "pause" else SHORT + 1.0)
            if now >= resume_at:
                self._signal(signal.SIGCONT)
                resume_at = float("inf")
            until = min(end, strike_at, resume_at) - now
            for link in wait(list(by_link), max(0.0, until)):
                rank = by_link[link]  # type: ignore[index]
                try:
                    when, what, *more = link.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del by_link[link]  # type: ignore[arg-type]
                    continue
                seen = self.seen[rank]
                if what == "step":
                    seen.step = more[0]
                    here = rank == self.plan.victims[0] and seen.step == self.plan.at and not struck
                    if here and strike_at == float("inf"):
                        strike_at = when + self.plan.delay
                        struck = struck or set(self.plan.victims)
                elif what == "end":
                    seen.outcome, seen.culprits, seen.text = more
                    seen.when = when

    def _strike(self) -> None:
        self.struck = time.monotonic()
        if self.plan.fault in ("kill", "kill two"):
            self._signal(signal.SIGKILL)
        elif self.plan.fault in ("pause", "stop"):
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for victim in self.plan.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[victim].pid, number)

    def _judge(self) -> list[str]:
        expected, victims, wrong = FAULTS[self.plan.fault], self.plan.victims, []
        killed = self.plan.fault in ("kill", "kill two")
        # At the very end the fault may come too late to be noticed.
        late = any(self.seen[v].step >= STEPS - 1 or self.seen[v].outcome == "right" for v in victims)
        # A rank that ends by its error is lost for those that were not told why: in another part of a split.
        ended = {*victims, *(r for r, s in enumerate(self.seen) if s.outcome == expected != "right")}
        for rank, seen in enumerate(self.seen):
            if rank in victims and (killed or (self.plan.fault == "leave" and seen.outcome == "right")):
                continue
            good = seen.outcome == expected or (late and seen.outcome == "right")
            if self.plan.fault == "stop" and rank in victims:
                good = good or seen.outcome == "PeerLostError"  # when it goes on the others may have ended
            if good and seen.outcome != "right" and rank not in victims:
                good = bool(set(victims) & set(seen.culprits))
            if seen.outcome == "PeerLostError" and rank not in victims:
                good = bool(seen.culprits) and ended - {rank} >= set(seen.culprits)
            if self.plan.fault == "stop" and seen.outcome == expected and self.plan.at % 7 in (2, 3, 4):
                good = True  # in and beside a split each communicator knows of its own waits only
            if self.plan.fault == "no descriptors" and rank in victims:
                good = seen.outcome in ("BackendError", "right")  # a part of one rank needs none
            if self.plan.fault == "no descriptors" and self.seen[victims[0]].outcome == "right":
                good = seen.outcome == "right"
            if not good:
                what = f"{seen.outcome or 'nothing'} {seen.culprits} {seen.text}"
                wrong.append(f"rank {rank} at step {seen.step}: {what}")
        return wrong

    def longest(self) -> float:
        """Seconds from the strike to the last rank's error, for faults that end a round."""
        ends = [
            s.when for r, s in enumerate(self.seen) if r not in self.plan.victims and "Error" in s.outcome
        ]
        return max(ends) - self.struck if ends and self.struck else 0.0


def left_behind(folder: Path, pids: set[int]) -> list[str]:
    """Rings of processes that were not killed."""
    return [p.name for p in folder.iterdir() if not any(str(pid) in p.name for pid in pids)]


def table(results: dict[tuple[str, str], list[Play]], seconds: float, seed: int) -> str:
    rounds = sum(len(plays) for plays in results.values())
    lines = [
        "# Chaos: what was broken, and what came of it",
        "",
        "Generated by `make chaos`. Each round is a fresh group of processes that run random legal programs:",
        "collectives, asynchronous ones, splits, messages, objects, tensors in their own and shared memory.",
        "At a random step something happens to one of them. Afterwards each rank that lives has either the",
        "right data or the error that says what happened and to whom, or the round has failed.",
        "",
        f"{rounds} rounds from seed {seed} in {seconds:.0f} s. No wrong data, no hang, nothing left behind.",
        "",
        "| fault | backend | rounds | outcomes of the others | time to the last error: median, longest |",
        "|---|---|---|---|---|",
    ]
    for (fault, backend), plays in sorted(results.items()):
        outcomes = Counter(
            s.outcome
            for p in plays
            for r, s in enumerate(p.seen)
            if r not in p.plan.victims or fault == "none"
        )
        times = [p.longest() for p in plays if p.longest() > 0]
        took = f"{statistics.median(times):.2f} s, {max(times):.2f} s" if times else "-"
        said = ", ".join(f"{name} {n}" for name, n in outcomes.most_common())
        lines.append(f"| {fault} | {backend} | {len(plays)} | {said} | {took} |")
    lines += [
        "",
        f"`stop` (SIGSTOP) outlasts the operations' timeout of {SHORT:g} s; `pause` is a stop of 0.3 s.",
        "A fault at the very end of a round may come too late: then the results are right.",
        "",
    ]
    return "\n".join(lines)


def play_all(
    seeds: list[int], sizes: list[int], backends: list[str], faults: list[str], console: Console
) -> tuple[dict[tuple[str, str], list[Play]], list[str]]:
    results: dict[tuple[str, str], list[Play]] = defaultdict(list)
    failures: list[str] = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(seeds))
        for seed in seeds:
            plan = Round.of(seed, sizes, backends, faults)
            progress.update(task, description=f"{plan.fault}, {plan.size} ranks, {plan.backend}")
            with tempfile.TemporaryDirectory(prefix="unicomm-chaos-") as name:
                folder = Path(name)
                play = Play(plan, store, folder)
                wrong = play.run()
                killed = {play.processes[v].pid for v in plan.victims if plan.fault.startswith("kill")}
                wrong += [f"left behind: {what}" for what in left_behind(folder, killed)]
                if wrong:
                    said = subprocess.run(
                        [sys.executable, "-m", "unicomm", "trace", "analyze", name],
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    head = f"{plan}"
                    failures.append("\n  ".join([head, *wrong, said.stdout[:1500]]))
                    console.print(failures[-1], style="red", highlight=False, markup=False)
            results[plan.fault, plan.backend].append(play)
            progress.advance(task)
    return results, failures


def command() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the others follow")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--backends", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--write", type=Path, help="the table goes there when all rounds were good")
    options = parser.parse_args()
    console = Console()
    began = time.monotonic()
    seeds = list(range(options.seed, options.seed + options.rounds))
    results, failures = play_all(seeds, options.sizes, options.backends, options.faults, console)
    text = table(results, time.monotonic() - began, options.seed)
    if failures:
        console.print(f"{len(failures)} of {options.rounds} rounds failed", style="red")
        return 1
    if options.write:
        options.write.write_text(text)
    console.print(text, highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(command())
