"""The command `unicomm`."""

from __future__ import annotations

from typing import Annotated

import typer

from .commands import build as build_cli
from .commands import profile as profile_cli
from .commands import run as run_cli
from .commands import trace as trace_cli

app = typer.Typer(
    help="unicomm: one communicator for PyTorch, and a flight recorder that is always on.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(trace_cli.app, name="trace", help="Look at what the flight recorder holds.")
app.add_typer(profile_cli.app, name="profile", help="Look at profiles of all ranks together.")
app.add_typer(build_cli.app, name="build", help="Build optional parts with this machine's compiler.")
app.command(context_settings=run_cli.SETTINGS)(run_cli.run)


@app.callback()
def _root() -> None:
    """Keeps `unicomm COMMAND` the form of every call."""


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
) -> None:
    """What works on this machine, what is missing, and the cure.

    Exit code 0 when the core and at least one backend work, else 1.
    """
    from unicomm.launch.doctor.report import run

    raise typer.Exit(run(json))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
