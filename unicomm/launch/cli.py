"""The command `unicomm`."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from unicomm import __version__

from .commands import bench, build, doctor, profile, rehearse, run, trace

app = typer.Typer(
    help="unicomm: one communicator for PyTorch, and a flight recorder that is always on.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(trace.app, name="trace", help="Reads the flight recorder: what ranks did, and what went wrong.")
app.add_typer(
    profile.app, name="profile", help="Merges the profiler's traces of all ranks, and reports on them."
)
app.add_typer(build.app, name="build", help="Builds optional parts with this machine's compiler.")
app.command(context_settings=run.SETTINGS)(run.run)
app.command()(bench.bench)
app.command(context_settings=rehearse.SETTINGS)(rehearse.rehearse)
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from unicomm.launch.doctor.findings import version_of

        print(f"unicomm {__version__}, torch {version_of('torch')}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print versions and end")
    ] = False,
) -> None:
    """Makes every call have the form `unicomm COMMAND`."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
