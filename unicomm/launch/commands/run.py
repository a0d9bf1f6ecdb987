"""`unicomm run`: passes its arguments on to torchrun's parser."""

from __future__ import annotations

import sys

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run(context: typer.Context) -> None:
    """Starts a program's ranks: torchrun, with unicomm behind torch.distributed and a verdict on failures."""
    from unicomm.launch.run.launcher import main

    code = main(context.args)
    sys.stdout.flush()
    raise typer.Exit(code)
