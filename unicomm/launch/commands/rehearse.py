"""`unicomm rehearse`: runs a program as many ranks that move no data, and judges their operations."""

from __future__ import annotations

import enum
import sys
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import FOUND, GOOD, UNUSABLE, print_error, print_line, progress

if TYPE_CHECKING:
    from rich.console import Console

    from unicomm.rehearse.rehearsal import Rehearsal

SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
_LAST_LINES = 20


class Values(str, enum.Enum):
    MADE_UP = "made-up"
    REAL = "real"


class Sends(str, enum.Enum):
    RENDEZVOUS = "rendezvous"
    BUFFERED = "buffered"


def rehearse(
    program: Annotated[Path, typer.Argument(help="the training program, a Python file")],
    arguments: Annotated[list[str] | None, typer.Argument(help="its arguments")] = None,
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", min=1, help="ranks of a node")] = 8,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, help="nodes")] = 1,
    sample: Annotated[
        bool,
        typer.Option("--sample", help="run the first, second and last rank of each dimension of the mesh"),
    ] = False,
    values: Annotated[
        Values,
        typer.Option(help="made-up: from a rank's own data; real: what others sent, one rank at a time"),
    ] = Values.MADE_UP,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="ranks at a time; default: one a core; real values: 1")
    ] = None,
    sends: Annotated[
        Sends, typer.Option(help="rendezvous: a send waits for its receive; buffered: it does not")
    ] = Sends.RENDEZVOUS,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="messages of a group run in order, as on a GPU without a batch")
    ] = False,
    topology: Annotated[
        str | None,
        typer.Option(help="forecast for a preset, as 8xH100+400G, or for a TOML file"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    github: Annotated[bool, typer.Option("--github", help="print annotations for a pull request")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with a timeline")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also print call paths")] = False,
    patience: Annotated[float, typer.Option(min=1, help="seconds that a rank may take")] = 300.0,
    records: Annotated[int, typer.Option(min=16, help="operations of a rank that are kept")] = 16384,
) -> None:
    """Finds the hang before the cluster does: runs a program as many ranks on this machine, without data.

    Each rank is a process that runs the unchanged program, one after the other. Nothing is sent; what a rank
    would receive is made up from its own data, unless `--values real` moves it. Then the operations of all
    ranks are compared, and played by the rules by which they block. The verdicts are those of `unicomm trace
    analyze`.

        unicomm rehearse --nproc-per-node 4 train.py --steps 3
        unicomm rehearse --nnodes 128 --nproc-per-node 8 --sample train.py
        unicomm rehearse --nnodes 2 --topology 8xH100+400G train.py
        unicomm rehearse --values real --sends buffered --github train.py

    A few steps are enough. The program has to run on the CPU where there is no GPU.

    Exit code 0: the operations fit together; 1: they do not; 2: the program could not be rehearsed.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn

    from unicomm.rehearse.play import Rules
    from unicomm.rehearse.rehearsal import rehearse as run

    console, errors = Console(), Console(stderr=True)
    if html is not None and not html.parent.is_dir():
        print_error(errors, f"--html {html}: the folder {html.parent} does not exist")
        raise typer.Exit(UNUSABLE)
    from unicomm.rehearse.forecast.topology import load

    rules = Rules(buffered=sends is Sends.BUFFERED, messages_in_order=in_order)
    try:
        with progress(errors, MofNCompleteColumn()) as bar:
            task = bar.add_task("ranks", total=None)
            done = run(
                program,
                nnodes * nproc_per_node,
                arguments=arguments or (),
                topology=None if topology is None else load(topology),
                nnodes=nnodes,
                sample=sample,
                real_values=values is Values.REAL,
                jobs=jobs,
                rules=rules,
                records=records,
                patience=patience,
                progress=lambda count, total: bar.update(task, completed=count, total=total),
            )
    except (OSError, ValueError) as error:
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
    if done.unusable:
        print_line(errors, "\n".join(done.output.splitlines()[-_LAST_LINES:]), "dim")
        print_error(errors, done.unusable)
        raise typer.Exit(UNUSABLE)
    _write(done, json, github, html, verbose, console, errors)
    raise typer.Exit(GOOD if done.good else FOUND)


def _write(
    done: Rehearsal,
    json: bool,
    github: bool,
    html: Path | None,
    verbose: bool,
    console: Console,
    errors: Console,
) -> None:
    """Writes the report in the forms asked for."""
    from unicomm.flight_recorder.reports import report_html
    from unicomm.flight_recorder.reports.report_data import to_json
    from unicomm.flight_recorder.reports.report_text import render
    from unicomm.rehearse.forecast.forecast_text import render as render_forecast
    from unicomm.rehearse.github import to_annotations

    if html is not None:
        report_html.write(done.report, done.table, html)
        print_line(errors, f"wrote {html}", "dim")
    if json:
        report = {**loads(to_json(done.report)), "forecast": done.forecast and done.forecast.to_json()}
        sys.stdout.write(dumps(report, indent=2) + "\n")
    elif github:
        sys.stdout.write(to_annotations(done.report))
    else:
        console.print(render(done.report, verbose))
        if done.forecast is not None:
            console.print(render_forecast(done.forecast), highlight=False, soft_wrap=True)
