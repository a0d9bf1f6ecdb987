"""What the commands of `unicomm profile` do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress

from unicomm.profiler.chrome import TraceError

from .terminal import GOOD, UNUSABLE, print_error, progress


def _guarded(run: Callable[[Console, Progress], None]) -> int:
    """Runs an action with a progress bar and prints its errors. Returns the exit code."""
    errors = Console(stderr=True)
    gc.disable()  # millions of small objects and no cycles: collecting takes a tenth of the time
    try:
        with progress(errors, DownloadColumn()) as bar:
            run(errors, bar)
    except (TraceError, ImportError, OSError) as error:
        print_error(errors, error)
        return UNUSABLE
    finally:
        gc.enable()
    return GOOD


def _print_remarks(errors: Console, remarks: list[str]) -> None:
    for remark in remarks:
        errors.print(f"note: {remark}", style="yellow", markup=False, soft_wrap=True)


def merge(traces: list[Path], output: Path) -> int:
    from unicomm.profiler.merging import merge as run

    def go(errors: Console, bar: Progress) -> None:
        task = bar.add_task("merging", total=None)
        done = run(traces, output, lambda at, total: bar.update(task, completed=at, total=total))
        widest = max((abs(o) for o in done.offsets_ns.values()), default=0)
        ranks = f"{len(done.ranks)} rank{'s' if len(done.ranks) != 1 else ''}"
        errors.print(
            f"wrote {output}: {ranks}, {done.events} events, {done.operations} operations,"
            f" {done.flows} flows; clocks moved by at most {widest / 1000:.1f} us",
            markup=False,
            soft_wrap=True,
        )
        _print_remarks(errors, done.remarks)

    return _guarded(go)


def report(inputs: list[Path], as_json: bool, html: Path | None) -> int:
    from unicomm.profiler import figures

    def go(errors: Console, bar: Progress) -> None:
        if html is not None:  # reports a missing package before the long work
            if not html.parent.is_dir():
                raise TraceError(f"--html {html}: the folder {html.parent} does not exist")
            import_module("unicomm.profiler.figures_html")
        task = bar.add_task("reading", total=None)
        found = figures.report(inputs, lambda at, total: bar.update(task, completed=at, total=total))
        if html is not None:
            import_module("unicomm.profiler.figures_html").write(found, html)
            errors.print(f"wrote {html}", style="dim", markup=False, soft_wrap=True)
        _print_remarks(errors, found.remarks)
        if as_json:
            sys.stdout.write(figures.to_json(found) + "\n")
        else:
            from unicomm.profiler.figures_text import render

            Console().print(render(found))

    return _guarded(go)


def annotate(trace: Path, annotations: Path, output: Path) -> int:
    from unicomm.profiler.annotations import annotate as run

    def go(errors: Console, bar: Progress) -> None:
        task = bar.add_task("annotating", total=None)
        done = run(trace, annotations, output, lambda at, total: bar.update(task, completed=at, total=total))
        errors.print(f"wrote {output}: {done} kernels annotated", markup=False, soft_wrap=True)
        if not done:
            why = "no kernel of the trace belongs to a node of the annotations: are both of one run?"
            _print_remarks(errors, [why])

    return _guarded(go)
