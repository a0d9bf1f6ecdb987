"""`unicomm profile`: merge, report, annotate. Imports neither torch nor, before a command runs, numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import (
    UNUSABLE,
    Gigabytes,
    PlainGroup,
    end_without_package,
    in_bytes,
    print_error,
    print_line,
    progress,
    with_extra,
)

if TYPE_CHECKING:
    from rich.console import Console

    from unicomm.profiler.chrome import Progress

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)

Traces = Annotated[list[Path], typer.Argument(help="one Chrome trace per rank (.json or .json.gz)")]


@app.callback()
def _root() -> None:
    """Merges the profiler's traces of all ranks, and reports on them."""


@contextmanager
def _progress(what: str) -> Iterator[tuple[Console, Progress]]:
    """Yields stderr, and what shows the progress there. An error ends the command, and is printed."""
    import gc

    from rich.console import Console
    from rich.progress import DownloadColumn

    from unicomm.profiler.chrome import TraceError

    errors = Console(stderr=True)
    gc.disable()  # millions of small objects and no cycles: collecting takes a tenth of the time
    try:
        with progress(errors, DownloadColumn()) as bar:
            task = bar.add_task(what, total=None)
            yield errors, lambda at, total: bar.update(task, completed=at, total=total)
    except (TraceError, ImportError, OSError) as error:
        if isinstance(error, ImportError):
            end_without_package(error, "`unicomm profile`", "profile")
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
    finally:
        gc.enable()


def _print_remarks(errors: Console, remarks: list[str]) -> None:
    for remark in remarks:
        print_line(errors, f"note: {remark}", "yellow")


@app.command()
@with_extra("`unicomm profile`", "profile")
def merge(
    traces: Traces,
    output: Annotated[Path, typer.Option("--output", "-o", help="merged .json, .json.gz or .pftrace file")],
    memory: Gigabytes = None,
) -> None:
    """Merges the ranks' traces on one clock, with a flow through all ranks for each collective.

        unicomm profile merge traces/*.json -o merged.json.gz
        unicomm profile merge traces/*.json -o merged.pftrace

    Open the result in ui.perfetto.dev. Exit code 2 when a trace cannot be used.
    """
    from unicomm.profiler.merging import merge as run

    with _progress("merging") as (errors, advance):
        done = run(traces, output, advance, in_bytes(memory))
        widest = max((abs(o) for o in done.offsets_ns.values()), default=0)
        ranks = f"{len(done.ranks)} rank{'s' if len(done.ranks) != 1 else ''}"
        print_line(
            errors,
            f"wrote {output}: {ranks}, {done.events} events, {done.operations} operations,"
            f" {done.flows} flows; clocks moved by at most {widest / 1000:.1f} us",
        )
        _print_remarks(errors, done.remarks)


@app.command()
@with_extra("`unicomm profile`", "profile")
def report(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="one Chrome trace per rank; or folders, files or archives with rings or dumps of the flight"
            " recorder; default: this user's newest job"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    html: Annotated[Path | None, typer.Option(help="write one HTML file with plots")] = None,
    memory: Gigabytes = None,
) -> None:
    """Reports where the time of communication goes, and which ranks are late by how much.

        unicomm profile report traces/*.json
        unicomm profile report /tmp/rings --json

    Exit code 2 when nothing could be read.
    """
    from unicomm.profiler import figures

    with _progress("reading") as (errors, advance):
        if html is not None:  # reports a missing package before the long work
            if not html.parent.is_dir():
                raise FileNotFoundError(f"--html {html}: the folder {html.parent} does not exist")
            import_module("unicomm.profiler.figures_html")
        found = figures.report(inputs or [], advance, in_bytes(memory))
        if html is not None:
            import_module("unicomm.profiler.figures_html").write(found, html)
            print_line(errors, f"wrote {html}", "dim")
        _print_remarks(errors, found.remarks)
        if json:
            print(figures.to_json(found))
        else:
            from rich.console import Console

            from unicomm.profiler.figures_text import render

            Console().print(render(found))


@app.command()
@with_extra("`unicomm profile`", "profile")
def annotate(
    trace: Annotated[Path, typer.Argument(help="a Chrome trace with replayed CUDA graphs")],
    annotations: Annotated[Path, typer.Argument(help="the file that graph_annotations(...).save wrote")],
    output: Annotated[Path, typer.Option("--output", "-o", help="annotated .json or .json.gz file")],
    memory: Gigabytes = None,
) -> None:
    """Adds operations captured in CUDA graphs to the arguments of the replayed kernels of a trace.

        unicomm profile annotate rank0.json rank0.annotations.json -o rank0.annotated.json

    Exit code 2 when an input cannot be used.
    """
    from unicomm.profiler.annotations import annotate as run

    with _progress("annotating") as (errors, advance):
        done = run(trace, annotations, output, advance, in_bytes(memory))
        print_line(errors, f"wrote {output}: {done} kernels annotated")
        if not done:
            why = "no kernel of the trace belongs to a node of the annotations: are both of one run?"
            _print_remarks(errors, [why])
