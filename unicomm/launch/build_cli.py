"""`unicomm build`: optional parts that need this machine's compiler."""

from __future__ import annotations

import typer

from .trace_cli import PlainGroup

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)


@app.callback()
def _root() -> None:
    """Build optional parts with this machine's compiler."""


@app.command("torch-bridge")
def torch_bridge() -> None:
    """Builds what emits torch's own record_param_comms events, for tools that read these.

    Needs a C++ compiler (CXX, else g++ or c++) and about 1 GB of memory for some ten seconds. Another torch
    needs another build. Exit code 1 when it fails.
    """
    from rich.console import Console

    from unicomm.profiler.bridge import BuildError, build

    console = Console(stderr=True)
    try:
        with console.status("compiling"):
            path = build()
    except BuildError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"built {path}; profilers that start from now on use it", markup=False, soft_wrap=True)
