"""Runs torch's own tests, and frameworks, on stock torch.distributed and with the switch, and compares them.

    python -m tests.compat.conductor                              # what the log has is not run again
    python -m tests.compat.conductor --only test_barrier Lightning
    python -m tests.compat.conductor --fresh --write              # `make compat`

The exit code is 1 when something passes on stock, fails with the switch and is not in exceptions.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests import ROOT
from tests.compat import frameworks, report, torch_runner
from tests.compat.outcomes import Log, Outcome

PAGE = ROOT / "docs" / "frameworks.md"


def options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "compat", help="folder of the results")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--once", action="store_true", help="do not run failed tests of torch a second time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="tests of torch, and frameworks")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    return parser.parse_args()


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    if chosen.fresh:
        shutil.rmtree(chosen.log, ignore_errors=True)
    torch_log, programs_log = Log(chosen.log / "torch_tests.jsonl"), Log(chosen.log / "frameworks.jsonl")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tests = torch_runner.all_tests()
    programs = list(frameworks.PROGRAMS)
    if chosen.only:
        tests = [t for t in tests if t in chosen.only]
        programs = [p for p in programs if p.name in chosen.only]
        if unknown := set(chosen.only) - set(tests) - {p.name for p in programs}:
            console.print(f"unknown: {', '.join(sorted(unknown))}", style="red")
            return 2
    programs = [p for p in programs if is_installed(p.package, console)]
    with Progress(*columns, console=console) as progress:

        def note(what: str, total: int) -> Callable[[Outcome], None]:
            task = progress.add_task(what, total=total)

            def say(one: Outcome) -> None:
                progress.advance(task)
                if one["outcome"] == "failed":
                    console.print(f"failed: {one['test']} ({what})", style="red", highlight=False)

            return say

        torch_runner.compare(torch_log, tests, not chosen.once, note)
        frameworks.compare(programs_log, programs, note)
    verdict = report.judge(torch_log, programs_log)
    if verdict.stale:
        console.print(
            f"passes, and is in {report.EXCEPTIONS.name}: {report.named(verdict.stale)}", style="yellow"
        )
    if verdict.unlisted:
        console.print(f"passes on stock only: {report.named(verdict.unlisted)}", style="red", highlight=False)
    if chosen.write:
        blocks = {
            "tests of torch": report.torch_table(torch_log, verdict),
            "frameworks": report.frameworks_table(programs_log),
        }
        report.write(PAGE, blocks)
    return 1 if verdict.unlisted else 0


def is_installed(package: str, console: Console) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        console.print(f"{package} is not installed and left out", style="yellow")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
