"""`unicomm doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="all checks, the variables, and what ran on what hardware")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """Checks what works on this machine: what is missing is named with its cure.

    Each backend runs a small all_reduce. The report also shows what the launcher's variables say about rank,
    size and store, where the rings of the flight recorder are, and which extras are installed.

        unicomm doctor
        unicomm doctor --verbose
        srun --ntasks 2 unicomm doctor
        unicomm doctor --json > report.json

    Exit code 0: the core and at least one backend work; 1: unicomm cannot be used here yet.
    """
    from unicomm.launch.doctor.report import run

    raise typer.Exit(run(json, verbose))
