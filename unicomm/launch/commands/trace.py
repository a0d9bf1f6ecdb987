"""`unicomm trace`: show, analyze and selftest. Imports neither torch nor, before a command runs, numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import trace_diff, trace_export, trace_top
from .terminal import (
    UNUSABLE,
    Gigabytes,
    PlainGroup,
    folder_with_rings,
    in_bytes,
    print_error,
    print_line,
    print_unreadable,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)
app.command()(trace_top.top)
app.command()(trace_diff.diff)
app.command()(trace_export.export)


@app.callback()
def _root() -> None:
    """Reads the flight recorder: what ranks did, and what went wrong."""


@app.command()
def show(
    folder: Annotated[
        Path | None, typer.Argument(help="folder with rings; default: where this user's processes write them")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=0, help="operations of each communicator; 0: all; default: 20, with --json all"),
    ] = None,
    comm: Annotated[str | None, typer.Option(help="only communicators of this name or description")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="only this rank; may be repeated")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="one row for each record")] = False,
    paths: Annotated[bool, typer.Option("--paths", help="the call path of each operation")] = False,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    memory: Gigabytes = None,
) -> None:
    """Shows the last operations of all ranks, whether they run, hang, are stopped or were killed.

    Each row is an operation and each column a rank. A cell says that the rank completed the operation and how
    long it took, or that it started and how long ago, or that it never issued it.

        unicomm trace show
        unicomm trace show /tmp/rings --last 50 --comm main

    Exit code 2 when there is nothing to show.
    """
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.memory import Memory, TooMuchMemoryError
    from unicomm.flight_recorder.reports import rings_text as tables
    from unicomm.flight_recorder.ring.reader import read_folder

    console, errors = Console(), Console(stderr=True)
    where = folder_with_rings(folder, errors)
    room = Memory(in_bytes(memory))
    rings, remarks = read_folder(where, room)
    if not rings:
        print_unreadable(errors, remarks)
        print_line(
            errors,
            f"no rings in {where}. Rings exist while a program with a communicator runs, and after it was"
            " killed or failed; UNICOMM_TRACE_KEEP=always keeps all, UNICOMM_TRACE_DIR sets the folder.",
        )
        raise typer.Exit(UNUSABLE)
    usual = 0 if json else 20
    what = tables.Selection(usual if last is None else last, comm, tuple(rank) if rank else None)
    try:
        room.check(tables.needed(rings, what), "a table of these operations")
    except TooMuchMemoryError as error:
        print_error(errors, f"{error}, or show fewer by --last")
        raise typer.Exit(UNUSABLE) from None
    if json:
        print(json_module.dumps(tables.as_data(rings, remarks, what)))
    elif raw:
        console.print(tables.render_raw(rings, what, paths))
    else:
        console.print(tables.render(rings, remarks, what, paths))


@app.command()
def analyze(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="folders, files or archives (tar, zip) with rings or dumps; default: this user's newest job"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the report for an issue tracker")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with a timeline")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="write a trace for ui.perfetto.dev")] = None,
    share: Annotated[
        bool, typer.Option("--share", help="leave out folders, host names and process numbers")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also print call paths")] = False,
    stuck_after: Annotated[
        float, typer.Option(min=0, help="seconds after which a running process's operation counts as stuck")
    ] = 2.0,
    memory: Gigabytes = None,
) -> None:
    """Finds what went wrong: the culprit ranks, the operation, the line of code, and what to do.

    Also shows which rank waits for which. Reads rings of running, hung, stopped and dead processes, and dumps
    of torch and torchcomms.

        unicomm trace analyze
        unicomm trace analyze /tmp/dumps --json
        unicomm trace analyze dumps.tar.gz --share --markdown

    Exit code 0: nothing is wrong; 1: something is; 2: nothing could be read.
    """
    from .trace_actions import Outputs
    from .trace_actions import analyze as run

    outputs = Outputs(json, markdown, html, perfetto, share, verbose)
    raise typer.Exit(run(paths or [], stuck_after, outputs, in_bytes(memory)))


@app.command()
def selftest(
    largest: Annotated[int, typer.Option(min=2, help="leave out cases with more ranks")] = 16384,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Tests the analyzer on a corpus of injected faults.

    Prints, for each verdict, the precision and the recall with which the culprits are found.

        unicomm trace selftest --largest 256

    Exit code 0: both are at least 0.99 over the whole corpus; else 1.
    """
    from .trace_actions import selftest as run

    raise typer.Exit(run(largest, json))
