"""What the commands of `unicomm profile` do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import DownloadColumn

from unicomm.profiler.chrome import Progress, TraceError

from .terminal import UNUSABLE, print_error, print_line, progress


@contextmanager
def _progress(what: str) -> Iterator[tuple[Console, Progress]]:
    """Yields stderr, and what shows the progress there. An error ends the command, and is printed."""
    errors = Console(stderr=True)
    gc.disable()  # millions of small objects and no cycles: collecting takes a tenth of the time
    try:
        with progress(errors, DownloadColumn()) as bar:
            task = bar.add_task(what, total=None)
            yield errors, lambda at, total: bar.update(task, completed=at, total=total)
    except (TraceError, ImportError, OSError) as error:
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
    finally:
        gc.enable()


def _print_remarks(errors: Console, remarks: list[str]) -> None:
    for remark in remarks:
        print_line(errors, f"note: {remark}", "yellow")


def merge(traces: list[Path], output: Path) -> None:
    from unicomm.profiler.merging import merge as run

    with _progress("merging") as (errors, advance):
        done = run(traces, output, advance)
        widest = max((abs(o) for o in done.offsets_ns.values()), default=0)
        ranks = f"{len(done.ranks)} rank{'s' if len(done.ranks) != 1 else ''}"
        print_line(
            errors,
            f"wrote {output}: {ranks}, {done.events} events, {done.operations} operations,"
            f" {done.flows} flows; clocks moved by at most {widest / 1000:.1f} us",
        )
        _print_remarks(errors, done.remarks)


def report(inputs: list[Path], as_json: bool, html: Path | None) -> None:
    from unicomm.profiler import figures

    with _progress("reading") as (errors, advance):
        if html is not None:  # reports a missing package before the long work
            if not html.parent.is_dir():
                raise TraceError(f"--html {html}: the folder {html.parent} does not exist")
            import_module("unicomm.profiler.figures_html")
        found = figures.report(inputs, advance)
        if html is not None:
            import_module("unicomm.profiler.figures_html").write(found, html)
            print_line(errors, f"wrote {html}", "dim")
        _print_remarks(errors, found.remarks)
        if as_json:
            sys.stdout.write(figures.to_json(found) + "\n")
        else:
            from unicomm.profiler.figures_text import render

            Console().print(render(found))


def annotate(trace: Path, annotations: Path, output: Path) -> None:
    from unicomm.profiler.annotations import annotate as run

    with _progress("annotating") as (errors, advance):
        done = run(trace, annotations, output, advance)
        print_line(errors, f"wrote {output}: {done} kernels annotated")
        if not done:
            why = "no kernel of the trace belongs to a node of the annotations: are both of one run?"
            _print_remarks(errors, [why])
