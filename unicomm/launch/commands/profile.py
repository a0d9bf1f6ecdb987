"""`unicomm profile`: merge, report, annotate. Imports neither torch nor, before a command runs, numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import PlainGroup

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)

Traces = Annotated[list[Path], typer.Argument(help="one Chrome trace per rank (.json or .json.gz)")]


@app.callback()
def _root() -> None:
    """Merges the profiler's traces of all ranks, and reports on them."""


@app.command()
def merge(
    traces: Traces,
    output: Annotated[Path, typer.Option("--output", "-o", help="merged .json, .json.gz or .pftrace file")],
) -> None:
    """Merges the ranks' traces on one clock, with a flow through all ranks for each collective.

        unicomm profile merge traces/*.json -o merged.json.gz
        unicomm profile merge traces/*.json -o merged.pftrace

    Open the result in ui.perfetto.dev. Exit code 2 when a trace cannot be used.
    """
    from .profile_actions import merge as run

    run(traces, output)


@app.command()
def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="one Chrome trace per rank; or folders, files or archives with rings or dumps of the flight"
            " recorder; default: this user's rings"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with plots")] = None,
) -> None:
    """Reports where the time of communication goes, and which ranks are late by how much.

        unicomm profile report traces/*.json
        unicomm profile report /tmp/rings --json

    Exit code 2 when nothing could be read.
    """
    from .profile_actions import report as run

    run(inputs or [], json, html)


@app.command()
def annotate(
    trace: Annotated[Path, typer.Argument(help="a Chrome trace with replayed CUDA graphs")],
    annotations: Annotated[Path, typer.Argument(help="the file that graph_annotations(...).save wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="annotated .json or .json.gz file")],
) -> None:
    """Adds operations captured in CUDA graphs to the arguments of the replayed kernels of a trace.

        unicomm profile annotate rank0.json rank0.annotations.json -o rank0.annotated.json

    Exit code 2 when an input cannot be used.
    """
    from .profile_actions import annotate as run

    run(trace, annotations, output)
