"""`unicomm trace`: reading the flight recorder. Imports neither torch nor, before a command runs, numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from . import trace_diff, trace_top


class PlainGroup(TyperGroup):
    """Lists its commands without rich, whose import takes longer than all the rest of `--help`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"rich_markup_mode": None})


app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)
app.command()(trace_top.top)
app.command()(trace_diff.diff)

UNUSABLE = 2


@app.callback()
def _root() -> None:
    """Look at what the flight recorder holds."""


@app.command()
def show(
    folder: Annotated[
        Path | None, typer.Argument(help="folder with rings; default: where this user's processes write them")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="operations of each communicator; 0: all")] = 20,
    comm: Annotated[str | None, typer.Option(help="only the communicator of this name")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="only this rank; may be repeated")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="one row for each record")] = False,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Shows the last operations of all ranks, whether they run, hang, are stopped or were killed.

    A row is an operation, a column a rank: completed and how long it took, started and since when, or absent.

        unicomm trace show
        unicomm trace show /tmp/rings --last 50 --comm main

    Exit code 2 when there is nothing to show.
    """
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.reports import show as tables
    from unicomm.flight_recorder.ring.folder import FolderError, rings_folder
    from unicomm.flight_recorder.ring.reader import read_folder

    console, errors = Console(), Console(stderr=True)
    try:
        where = rings_folder() if folder is None else folder
    except FolderError as error:
        errors.print(str(error), style="red")
        raise typer.Exit(UNUSABLE) from None
    rings, findings = read_folder(where)
    if not rings:
        for finding in findings:
            errors.print(f"cannot read {finding.path}: {finding.message}", style="red", soft_wrap=True)
        errors.print(
            f"no rings in {where}. They are there while a program with a communicator runs, and after it was"
            " killed or failed; UNICOMM_TRACE_KEEP=always keeps them, UNICOMM_TRACE_DIR chooses the folder.",
            soft_wrap=True,
        )
        raise typer.Exit(UNUSABLE)
    if json:
        print(json_module.dumps(tables.as_data(rings, findings)))
    elif raw:
        console.print(tables.render_raw(rings, last, comm))
    else:
        console.print(tables.render(rings, findings, last, comm, rank or None))


@app.command()
def analyze(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="folders, files or archives (tar, zip) with rings or dumps; default: this user's rings"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON (schema in the docs)")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="the report for an issue tracker")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with a timeline")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="write a trace for ui.perfetto.dev")] = None,
    share: Annotated[bool, typer.Option("--share", help="without folders, host names and pids")] = False,
    stuck_after: Annotated[
        float, typer.Option(min=0, help="seconds after which a running process's operation counts as stuck")
    ] = 2.0,
) -> None:
    """Says what went wrong: the culprit ranks, the operation, the line, who waits for whom, what to do.

    Reads our rings, of running, hung, stopped and dead processes alike, and dumps of torch and torchcomms.

        unicomm trace analyze
        unicomm trace analyze /tmp/dumps --json
        unicomm trace analyze dumps.tar.gz --share --markdown

    Exit code 0: all good; 1: a finding; 2: nothing that could be read.
    """
    from .trace_actions import Outputs, run

    outputs = Outputs(json, markdown, html, perfetto, share)
    raise typer.Exit(run(paths or [], stuck_after, outputs))


@app.command()
def selftest(
    largest: Annotated[int, typer.Option(min=2, help="leave out cases with more ranks")] = 16384,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Analyzes a corpus of injected faults and prints precision and recall of the culprits per verdict.

    Exit code 0 when both are at least 0.95 over the whole corpus, else 1.
    """
    from .trace_actions import selftest as run_selftest

    raise typer.Exit(run_selftest(largest, json))
