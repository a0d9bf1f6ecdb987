"""The verdict that `unicomm run` prints after torchrun's error summary when ranks have failed."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.rule import Rule

from unicomm.flight_recorder.analysis.analyze import analyze
from unicomm.flight_recorder.analysis.verdict import Report, Verdict
from unicomm.flight_recorder.reports.report_text import render
from unicomm.flight_recorder.table.load import load
from unicomm.flight_recorder.texts import ranks_text
from unicomm.launch.commands.terminal import print_line

from .job import Evidence

_NARROW = 100  # columns when stderr is not a terminal


def show(evidence: Evidence, stopped: bool = False, root_cause: int | None = None) -> Report | None:
    """Prints the verdict, the folder of the rings, and commands that show more. Never raises.

    Args:
        stopped: whether the job was told to stop, so that there is no error that could be the cause.
        root_cause: the rank that torchrun calls so: the first one that it saw fail, which is often a victim.

    Returns the report; None if there is none, or if another host has it.
    """
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _NARROW)
    try:
        return _show(evidence, stopped, root_cause, console)
    except Exception as error:  # must not hide the job's own error
        print_line(console, f"unicomm could not analyze {evidence.folder}: {error}")
    return None


def _show(evidence: Evidence, stopped: bool, root_cause: int | None, console: Console) -> Report | None:
    report, cause = None, "" if stopped else " The error above is the cause."
    console.print(Rule("unicomm: what the flight recorder tells", align="left", style="bold"))
    if evidence.elsewhere:
        print_line(console, evidence.sentence or "No rank had created a communicator.")
        print_line(console, f"rings of {_hosts(evidence)}: {evidence.elsewhere}:{evidence.folder}")
    else:
        table = load([evidence.folder])
        report = None if table.empty else analyze(table)
        # Ranks without a communicator may have left files that say how they ended, or nothing of interest.
        if report is None or (report.main.verdict is Verdict.GOOD and not report.entries):
            print_line(console, f"Nothing was recorded: no rank had created a communicator.{cause}")
            return None
        console.print(render(report))
        main = report.main
        if main.culprits and root_cause in main.victims:
            print_line(
                console,
                f"torchrun's Root Cause above, rank {root_cause}, is a victim: it failed because of"
                f" {ranks_text(main.culprits)}.",
                "yellow",
            )
        if main.verdict is Verdict.GOOD:
            print_line(console, f"Communication was correct.{cause}")
        print_line(console, f"rings of {_hosts(evidence)}: {evidence.folder}")
        print_line(console, f"look further: unicomm trace analyze {evidence.folder} --html report.html")
        print_line(console, f"              unicomm trace show {evidence.folder}")
    for remark in evidence.remarks:
        print_line(console, remark, "yellow")
    return report


def _hosts(evidence: Evidence) -> str:
    return f"{evidence.hosts} hosts" if evidence.hosts > 1 else "this host"
