"""`unicomm run`: passes its arguments on to torchrun's parser."""

from __future__ import annotations

import logging
import os
import sys
import threading

import typer

SETTINGS = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,  # what follows the program is its own, also a "--"
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def run(context: typer.Context) -> None:
    """Starts a program's ranks: torchrun, with unicomm behind torch.distributed and a verdict on failures."""
    from unicomm.launch.run.stop_signals import StopSignals

    before = set(threading.enumerate())
    stop = StopSignals()
    stop.install()  # before torch is imported, which takes seconds
    from unicomm.launch.run.launcher import main

    code = main(context.args, stop)
    stop.ignore()
    _end(code, before)


def _end(code: int, before: set[threading.Thread]) -> None:
    """Ends the process with this exit code, even if a library has left a thread behind.

    The end of the interpreter aborts the process if a daemon thread is inside a C++ call then, as in torch's
    store, and waits without a limit for other threads.
    """
    sys.stdout.flush()
    if not set(threading.enumerate()) - before:
        raise typer.Exit(code)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
