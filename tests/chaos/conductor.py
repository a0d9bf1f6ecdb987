"""Rounds of random operations in which ranks are killed, stopped or cut off, and what comes of it.

    python tests/chaos/conductor.py                             # 500 rounds over all backends and faults
    python tests/chaos/conductor.py --jobs 1                    # one after the other
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
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tests import ROOT
from tests.chaos import mpi_places, report
from tests.chaos.players import Players
from tests.chaos.rounds import BACKENDS, FAULTS, Round
from tools import namespaces


def play_all(
    plans: Sequence[Round], players: Players, console: Console, note: Callable[[report.Record], None]
) -> None:
    """Plays the rounds, and calls `note` with the record of each."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bad]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    bad = 0
    playing: dict[int, str] = {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(plans), bad="")
        for plan, record in players.play(plans):
            if record is None:
                playing[plan.seed] = f"{plan.fault} ({plan.backend}, {plan.size})"
            else:
                del playing[plan.seed]
                note(record)
                if record["wrong"]:
                    bad += 1
                    text = "\n  ".join([f"bad: {plan}", *record["wrong"]])
                    console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
                progress.advance(task)
            progress.update(task, description="; ".join(playing.values()), bad=f"{bad} bad" if bad else "")


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
        )
    return "unknown"


def options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    width = max(map(len, FAULTS)) + 2
    faults = "\n".join(f"  {name:{width}}{fault.what}" for name, fault in FAULTS.items())
    parser = argparse.ArgumentParser(description=(__doc__ or "") + faults, formatter_class=raw)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the others follow")
    parser.add_argument("--jobs", type=int, default=4, help="rounds that are played at the same time (4)")
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
    if chosen.jobs < 1:
        parser.error("at least one round is played at a time")
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
    if (why := mpi_places.why_not()) and (under := [p for p in plans if p.backend == "mpi"]):
        console.print(f"{len(under)} rounds with MPI are left out: {why}", style="yellow")
        plans = [p for p in plans if p.backend != "mpi"]
    records = report.read(chosen.log) if chosen.log else []
    done = {r["seed"] for r in records}
    todo = [p for p in plans if p.seed not in done]

    def note(record: report.Record) -> None:
        records.append(record)
        if chosen.log:
            report.append(chosen.log, record)

    with Players(min(chosen.jobs, len(todo)), chosen.keep, commit()) as players:
        play_all(todo, players, console, note)
    bad = [str(r["seed"]) for r in records if r["wrong"]]
    if bad:
        console.print(f"{len(bad)} of {len(records)} rounds were bad: seeds {', '.join(bad)}", style="red")
        return 1
    text = report.table(records)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    if chosen.write and len({r["commit"] for r in records}) > 1:
        console.print("the page was not written: the rounds are of several commits", style="red")
        return 1
    if chosen.write:
        chosen.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(command())
