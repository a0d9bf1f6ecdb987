"""What `unicomm trace analyze` and `unicomm trace selftest` do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn

from unicomm.flight_recorder.analysis.analyze import analyze as analyze_table
from unicomm.flight_recorder.analysis.verdict import Report
from unicomm.flight_recorder.reports.report_data import shared, to_json
from unicomm.flight_recorder.reports.report_markdown import to_markdown
from unicomm.flight_recorder.reports.report_text import render
from unicomm.flight_recorder.ring.folder import FolderError, rings_folder
from unicomm.flight_recorder.table.load import load_job
from unicomm.flight_recorder.table.table import Table

from .terminal import FOUND, GOOD, UNUSABLE, print_error, print_line, print_unreadable, progress


@dataclass
class Outputs:
    """The outputs that the user asked for, besides or instead of the text on the terminal."""

    json: bool = False
    markdown: bool = False
    html: Path | None = None
    perfetto: Path | None = None
    share: bool = False
    verbose: bool = False


def _load(
    paths: list[Path], stuck_after: float, memory: int | None, errors: Console
) -> tuple[Table, Report | None]:
    with progress(errors, MofNCompleteColumn()) as bar:
        task = bar.add_task("reading", total=None)
        table = load_job(paths, lambda done, total: bar.update(task, completed=done, total=total), memory)
        if table.empty:
            return table, None
        step = bar.add_task("analyzing", total=None)
        return table, analyze_table(table, stuck_after, lambda name: bar.update(step, description=name))


def _writers(outputs: Outputs) -> list[tuple[Callable[[Report, Table, Path], None], Path]]:
    """Imports what writes the files, before the long work, so that a missing package is reported at once."""
    out: list[tuple[Callable[[Report, Table, Path], None], Path]] = []
    wanted = (("html", "report_html", outputs.html), ("perfetto", "perfetto", outputs.perfetto))
    for option, module, path in wanted:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise OSError(f"--{option} {path}: the folder {path.parent} does not exist")
        out.append((import_module(f"unicomm.flight_recorder.reports.{module}").write, path))
    return out


def analyze(paths: list[Path], stuck_after: float, outputs: Outputs, memory: int | None = None) -> int:
    """Reads, analyzes and prints. Returns the exit code."""
    console, errors = Console(), Console(stderr=True)
    try:
        writers = _writers(outputs)
        table, report = _load(paths, stuck_after, memory, errors)
    except (FolderError, OSError, ImportError) as error:
        print_error(errors, error)
        return UNUSABLE
    if report is None:
        return _nothing(paths, table, errors)
    if outputs.share:
        report = shared(report, table)
    for write, path in writers:
        try:
            write(report, table, path)
        except OSError as error:
            print_error(errors, f"cannot write {path}: {error}")
            return UNUSABLE
        print_line(errors, f"wrote {path}", "dim")
    if outputs.json:
        sys.stdout.write(to_json(report) + "\n")
    elif outputs.markdown:
        sys.stdout.write(to_markdown(report, outputs.verbose))
    else:
        console.print(render(report, outputs.verbose))
    return GOOD if report.good else FOUND


def _nothing(paths: list[Path], table: Table, errors: Console) -> int:
    print_unreadable(errors, table.remarks)
    where = ", ".join(map(str, paths)) or str(rings_folder())
    print_line(
        errors,
        f"no dump or ring in {where}. Rings exist while a program with a communicator runs, and after it was"
        " killed or failed; torch writes dumps to the path in TORCH_FR_DUMP_TEMP_FILE when a collective times"
        " out.",
    )
    return UNUSABLE


def selftest(largest: int, as_json: bool) -> int:
    """Runs the corpus and prints precision and recall. Returns the exit code."""
    from rich.table import Table as Grid

    from unicomm.flight_recorder.corpus.selftest import TARGET, run

    console, errors = Console(), Console(stderr=True)
    with progress(errors, MofNCompleteColumn()) as bar:
        task = bar.add_task("corpus", total=None)
        result = run(largest, lambda name: bar.update(task, advance=1, description=name))
    scores = {kind.value: score for kind, score in sorted(result.verdicts.items())}
    total = result.total
    if as_json:
        import json
        from dataclasses import asdict

        rows = {k: {**asdict(s), "precision": s.precision, "recall": s.recall} for k, s in scores.items()}
        data = {
            "kinds": len(result.kinds),
            "cases": total.cases,
            "main_right": result.main_right,
            "precision": total.precision,
            "recall": total.recall,
            "verdicts": rows,
            "failures": result.failures,
        }
        sys.stdout.write(json.dumps(data, indent=1) + "\n")
        return GOOD if result.good else FOUND
    grid = Grid(show_edge=False)
    for heading in ("verdict", "cases", "precision", "recall"):
        grid.add_column(heading, justify="left" if heading == "verdict" else "right")
    for name, score in [*scores.items(), ("all", total)]:
        style = "" if min(score.precision, score.recall) >= TARGET else "red"
        grid.add_row(name, str(score.cases), f"{score.precision:.3f}", f"{score.recall:.3f}", style=style)
    console.print(grid)
    for failure in result.failures:
        console.print(f"{failure['case']}: {failure['found']} instead of {failure['expected']}", markup=False)
    console.print(
        f"{len(result.kinds)} kinds of faults; the main finding is right in {result.main_right} of"
        f" {total.cases}."
    )
    return GOOD if result.good else FOUND
