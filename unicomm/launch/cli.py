"""The command `unicomm`."""

from __future__ import annotations

import typer

from .commands import build, doctor, profile, run, trace

app = typer.Typer(
    help="unicomm: one communicator for PyTorch, and a flight recorder that is always on.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(trace.app, name="trace", help="Reads the flight recorder: what ranks did, and what went wrong.")
app.add_typer(
    profile.app, name="profile", help="Merges the profiler's traces of all ranks, and reports on them."
)
app.add_typer(build.app, name="build", help="Builds optional parts with this machine's compiler.")
app.command(context_settings=run.SETTINGS)(run.run)
app.command()(doctor.doctor)


@app.callback()
def _root() -> None:
    """Makes every call have the form `unicomm COMMAND`."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
