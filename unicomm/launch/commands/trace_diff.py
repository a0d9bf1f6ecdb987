"""`unicomm trace diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import FOUND, GOOD, UNUSABLE, Gigabytes, in_bytes, print_line, print_unreadable


def diff(
    a: Annotated[Path, typer.Argument(help="one run: a folder, file or archive with rings or dumps")],
    b: Annotated[Path, typer.Argument(help="the other run")],
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    memory: Gigabytes = None,
) -> None:
    """Compares two runs: finds the first operation that differs, and how the operations' times changed.

        unicomm trace diff good-run/ bad-run/

    Exit code 0: both did the same; 1: they differ; 2: nothing could be read.
    """
    import json as json_module

    from rich.console import Console
    from rich.text import Text

    from unicomm.flight_recorder.analysis.diff import compare
    from unicomm.flight_recorder.memory import Memory
    from unicomm.flight_recorder.reports.diff_text import render
    from unicomm.flight_recorder.table.load import load
    from unicomm.flight_recorder.texts import printable

    errors = Console(stderr=True)
    tables = []
    room = Memory(in_bytes(memory))
    for path in (a, b):
        with errors.status(Text(printable(f"reading {path}"))):
            table = load([path], memory=room)
        if not table.sources:
            print_unreadable(errors, table.remarks)
            print_line(errors, f"no dump or ring in {path}")
            raise typer.Exit(UNUSABLE)
        tables.append(table)
    found = compare(*tables)
    if json:
        print(json_module.dumps(found.as_data()))
    else:
        Console().print(render(found))
    raise typer.Exit(GOOD if found.same else FOUND)
