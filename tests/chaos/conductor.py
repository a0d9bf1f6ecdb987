"""Rounds of random operations in which ranks are killed, stopped or cut off, and what comes of it.

    python tests/chaos/conductor.py                             # 500 rounds over all backends and faults
    python tests/chaos/conductor.py --seed 1234 --rounds 1      # one round again; a bad one says more
    python tests/chaos/conductor.py --backend gloo --fault kill "kill two"
    python tests/chaos/conductor.py --log rounds.jsonl          # in pieces: goes on where it stopped
    python tests/chaos/conductor.py --log rounds.jsonl --write docs/chaos.md

Each round has a seed, the first one that of --seed and the next ones those after it. Everything follows from
it but the exact moment. After a round every rank that lives must have had the right data, or in time the
right class of error with the right ranks to blame, and nothing of the round may be left. The exit code is 0
when all rounds were good, 1 when one was not, 2 for arguments that make no sense.

A bad round says its seed, what was wrong, what the flight recorder makes of it, how to play it again, and
where its rings and the ranks' output are kept. Faults:

"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests import ROOT
from tests.chaos import report
from tests.chaos.judge import judge
from tests.chaos.play import Play, Stage
from tests.chaos.program import RINGS
from tests.chaos.rounds import BACKENDS, FAULTS, Round
from tests.commands import run
from tools import namespaces
from unicomm.flight_recorder.ring.endings import side_files


def play_round(plan: Round, stage: Stage, kept: Path, serial: int) -> tuple[Play, list[str]]:
    """One round, and what was wrong with it. A bad one leaves its rings and output in `kept`."""
    # Ranks that are just being started write into it until the stage ends; its folder takes this one along.
    with tempfile.TemporaryDirectory(prefix="round-", dir=stage.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        play = Play(plan, stage, folder, serial)
        play.run()
        wrong = judge(play, folder)
        if wrong:
            for left in (*folder.glob("*.ucring"), *side_files(folder)):  # of those that were killed
                left.rename(folder / RINGS / left.name)
            wrong += [verdict(folder / RINGS), f"again: python tests/chaos/conductor.py {plan.again}"]
            kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            where = Path(tempfile.mkdtemp(prefix=f"seed{plan.seed}-", dir=kept))
            (folder / "wrong.txt").write_text("\n".join([str(plan), *wrong, ""]))
            shutil.copytree(folder, where, dirs_exist_ok=True)
            wrong.append(f"rings and output: {where}")
    return play, wrong


def verdict(folder: Path) -> str:
    """What the flight recorder makes of the ranks' rings."""
    command = [sys.executable, "-m", "unicomm", "trace", "analyze", str(folder)]
    said = run(command, within=120)
    return said.stdout[:1500].strip()


def play_all(plans: Sequence[Round], kept: Path, console: Console, note: Callable[..., None]) -> int:
    """Plays the rounds and calls `note(play, wrong, seconds)` after each; returns how many were bad."""
    bad = 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bad]}"),
        TimeRemainingColumn(),
    )
    with Stage() as stage, Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plans), bad="")
        for serial, plan in enumerate(plans):
            progress.update(task, description=f"{plan.fault}, {plan.size} ranks, {plan.backend}")
            began = time.monotonic()
            play, wrong = play_round(plan, stage, kept, serial)
            note(play, wrong, time.monotonic() - began)
            if wrong:
                bad += 1
                text = "\n  ".join([f"bad: {plan}", *wrong])
                console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=1, bad=f"{bad} bad" if bad else "")
    return bad


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        )
    return "unknown"


def options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    faults = "\n".join(f"  {name:16}{fault.what}" for name, fault in FAULTS.items())
    parser = argparse.ArgumentParser(description=(__doc__ or "") + faults, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the others follow")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[4, 4, 8], help="numbers of ranks to draw from"
    )
    parser.add_argument("--backend", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    kept = Path(tempfile.gettempdir(), "unicomm-chaos-failed")
    parser.add_argument("--keep", type=Path, default=kept, help=f"for what failed rounds leave ({kept})")
    parser.add_argument(
        "--log", type=Path, help="a line of JSON for each round; its rounds are not played again"
    )
    parser.add_argument("--write", type=Path, help="the table goes there when all rounds were good")
    chosen = parser.parse_args()
    if chosen.rounds < 0 or min(chosen.sizes) < 3:
        parser.error("rounds are at least 0, and ranks at least 3: two may be killed")
    if not any(b in FAULTS[f].backends for b in chosen.backend for f in chosen.fault):
        parser.error(f"nothing of {', '.join(chosen.fault)} can happen to {', '.join(chosen.backend)}")
    return chosen


def command() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # hosts and ranks end with this, as for Ctrl-C
    console = Console()
    seeds = range(chosen.seed, chosen.seed + chosen.rounds)
    plans = [Round.of(seed, chosen.sizes, chosen.backend, chosen.fault) for seed in seeds]
    if (why := namespaces.why_not()) and (apart := [p for p in plans if p.placement]):
        console.print(f"{len(apart)} rounds between hosts are left out: {why}", style="yellow")
        plans = [p for p in plans if not p.placement]
    records = report.read(chosen.log) if chosen.log else []
    done = {r["seed"] for r in records}
    version = commit()

    def note(play: Play, wrong: list[str], seconds: float) -> None:
        records.append(report.record(play, wrong, seconds, version))
        if chosen.log:
            report.append(chosen.log, records[-1])

    play_all([p for p in plans if p.seed not in done], chosen.keep, console, note)
    bad = [str(r["seed"]) for r in records if r["wrong"]]
    if bad:
        console.print(f"{len(bad)} of {len(records)} rounds were bad: seeds {', '.join(bad)}", style="red")
        return 1
    text = report.table(records)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if chosen.write:
        chosen.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(command())
