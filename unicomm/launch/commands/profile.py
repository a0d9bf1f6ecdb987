"""`unicomm profile`: the traces of all ranks. Imports neither torch nor, before a command runs, numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .trace import PlainGroup

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)

Traces = Annotated[list[Path], typer.Argument(help="one Chrome trace a rank (.json or .json.gz)")]


@app.callback()
def _root() -> None:
    """Look at profiles of all ranks together."""


@app.command()
def merge(
    traces: Traces,
    output: Annotated[Path, typer.Option("--output", "-o", help="merged .json, .json.gz or .pftrace")],
) -> None:
    """Puts the ranks' traces onto one clock and joins each collective by a flow through all ranks.

        unicomm profile merge traces/*.json -o merged.json.gz
        unicomm profile merge traces/*.json -o merged.pftrace

    Open the result in ui.perfetto.dev. Exit code 2 when a trace cannot be used.
    """
    from .profile_actions import merge as run

    raise typer.Exit(run(traces, output))


@app.command()
def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="one Chrome trace a rank; or folders, files or archives with rings or dumps of the flight"
            " recorder; default: this user's rings"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with plots")] = None,
) -> None:
    """Where the time of communication goes, and which ranks are late by how much.

        unicomm profile report traces/*.json
        unicomm profile report /tmp/rings --json

    Exit code 2 when nothing could be read.
    """
    from .profile_actions import report as run

    raise typer.Exit(run(inputs or [], json, html))


@app.command()
def annotate(
    trace: Annotated[Path, typer.Argument(help="a Chrome trace with replayed CUDA graphs")],
    annotations: Annotated[Path, typer.Argument(help="what graph_annotations(...).save wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="annotated .json or .json.gz")],
) -> None:
    """Puts operations captured in CUDA graphs onto the replayed kernels of a trace.

    Exit code 2 when an input cannot be used.
    """
    from .profile_actions import annotate as run

    raise typer.Exit(run(trace, annotations, output))
