"""`unicomm rehearse`: runs a program as many ranks that move no data, and judges their operations."""

from __future__ import annotations

import enum
import sys
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import FOUND, GOOD, UNUSABLE, print_error, print_line, progress

if TYPE_CHECKING:
    from rich.console import Console

    from unicomm.rehearse.rehearsal import Rehearsal
    from unicomm.rehearse.what_if import WhatIf

SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
_LAST_LINES = 20


MADE_UP, REAL = "made-up", "real"


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
        str | None,
        typer.Option(
            metavar="made-up|real|FILE",
            help="made-up: from a rank's own data; real: what others sent, one rank at a time; a file:"
            " what --save-values has recorded, else made up. Default: real for up to 64 ranks, made-up for"
            " more, and with --sample, --meta or --topology",
        ),
    ] = None,
    save_values: Annotated[
        Path | None, typer.Option(help="record the small values that ranks receive, which are real then")
    ] = None,
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
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="with --topology: also forecast with nnodes=N, nproc_per_node=N, topology=T, bucket_cap_mb=M"
        ),
    ] = None,
    meta: Annotated[
        bool,
        typer.Option("--meta", help="for models larger than the memory: large tensors have no data"),
    ] = False,
    simulate_cuda: Annotated[
        bool | None,
        typer.Option(
            "--simulate-cuda/--no-simulate-cuda",
            help="show the program GPUs, whose tensors are on the CPU; default: where there is no GPU",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    github: Annotated[bool, typer.Option("--github", help="print annotations for a pull request")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with a timeline")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="also print call paths")] = False,
    patience: Annotated[float, typer.Option(min=1, help="seconds that a rank may take")] = 300.0,
    records: Annotated[int, typer.Option(min=16, help="operations of a rank that are kept")] = 16384,
) -> None:
    """Finds the hang before the cluster does: runs a program as many ranks on this machine, without data.

    Each rank is a process that runs the unchanged program. Up to 64 ranks get the data that the others send
    them. More ranks run one after the other, and what a rank would receive is made up from its own data. Then
    the operations of all ranks are compared, and played by the rules by which they block. The verdicts are
    those of `unicomm trace analyze`.

        unicomm rehearse --nproc-per-node 4 train.py --steps 3
        unicomm rehearse --nnodes 128 --nproc-per-node 8 --sample train.py
        unicomm rehearse --nnodes 2 --topology 8xH100+400G train.py
        unicomm rehearse --nnodes 8 --meta train.py --model 70B
        unicomm rehearse --sends buffered --github train.py
        unicomm rehearse --nproc-per-node 4 --save-values small.json train.py
        unicomm rehearse --nproc-per-node 64 --values small.json train.py

        unicomm rehearse --topology 8xH100+400G --what-if nnodes=2 --what-if bucket_cap_mb=100 train.py

    A few steps are enough. Where there is no GPU, the program finds simulated ones, and runs on the CPU.

    Exit code 0: the operations fit together; 1: they do not; 2: the program could not be rehearsed.
    """
    from rich.console import Console
    from rich.progress import MofNCompleteColumn

    from unicomm.rehearse.play import Rules
    from unicomm.rehearse.rehearsal import rehearse as run_job
    from unicomm.rehearse.what_if import WhatIf

    console, errors = Console(), Console(stderr=True)
    if html is not None and not html.parent.is_dir():
        print_error(errors, f"--html {html}: the folder {html.parent} does not exist")
        raise typer.Exit(UNUSABLE)
    from unicomm.rehearse.forecast.topology import load

    others: list[tuple[WhatIf, Rehearsal]] = []
    rules = Rules(buffered=sends is Sends.BUFFERED, messages_in_order=in_order)
    shape = {
        "nnodes": nnodes,
        "nproc_per_node": nproc_per_node,
        "topology": topology,
        "bucket_cap_mb": None,
    }

    def run(job: dict[str, Any], save: Path | None = None) -> Rehearsal:
        place = None if job["topology"] is None else load(job["topology"])
        with progress(errors, MofNCompleteColumn()) as bar:
            task = bar.add_task("ranks", total=None)
            return run_job(
                program,
                job["nnodes"] * job["nproc_per_node"],
                arguments=arguments or (),
                topology=place,
                bucket_cap_mb=job["bucket_cap_mb"],
                nnodes=job["nnodes"],
                sample=sample,
                real_values=None if values is None else values == REAL,
                save_values=save,
                recorded_values=None if values in (None, MADE_UP, REAL) else values,
                meta=meta,
                simulate_cuda=simulate_cuda,
                jobs=jobs,
                rules=rules,
                records=records,
                patience=patience,
                progress=lambda count, total: bar.update(task, completed=count, total=total),
            )

    try:
        changes = [WhatIf.parse(text) for text in what_if or ()]
        if changes and topology is None:
            raise ValueError("--what-if compares forecasts: give a --topology")
        for change in changes:
            if change.name == "topology":
                load(str(change.value))
        done = run(shape, save_values)
        if done.good:
            others = [(change, run({**shape, change.name: change.value})) for change in changes]
    except (OSError, ValueError) as error:
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
    if save_values is not None:
        print_line(errors, f"wrote {save_values}", "dim")
    if done.unusable:
        print_line(errors, "\n".join(done.output.splitlines()[-_LAST_LINES:]), "dim")
        print_error(errors, done.unusable)
        raise typer.Exit(UNUSABLE)
    _write(done, others, json, github, html, verbose, console, errors)
    raise typer.Exit(GOOD if done.good else FOUND)


def _write(
    done: Rehearsal,
    others: list[tuple[WhatIf, Rehearsal]],
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
    from unicomm.rehearse.what_if import compare, forecast_of

    if html is not None:
        report_html.write(done.report, done.table, html)
        print_line(errors, f"wrote {html}", "dim")
    if json:
        report = {**loads(to_json(done.report)), "forecast": done.forecast and done.forecast.to_json()}
        if others:
            found = {str(change): forecast_of(one) for change, one in others}
            report["what_if"] = {name: one and one.to_json() for name, one in found.items()}
        sys.stdout.write(dumps(report, indent=2) + "\n")
    elif github:
        sys.stdout.write(to_annotations(done.report))
    else:
        console.print(render(done.report, verbose))
        if done.forecast is not None:
            console.print(render_forecast(done.forecast), highlight=False, soft_wrap=True)
        if others:
            console.print(compare(done, others), highlight=False, soft_wrap=True)
