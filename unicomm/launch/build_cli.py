"""`unicomm build`: optional parts that need this machine's compiler."""

from __future__ import annotations

from typing import Annotated

import typer

from .trace_cli import PlainGroup

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)


@app.callback()
def _root() -> None:
    """Build optional parts with this machine's compiler."""


@app.command("torch-bridge")
def torch_bridge(
    part: Annotated[
        str, typer.Option(help="Only this part: record (torch's events) or symmetric (its symmetric memory).")
    ] = "",
) -> None:
    """Builds what needs torch's own ABI: its record_param_comms events, its symmetric memory on CPU tensors.

    Needs a C++ compiler (CXX, else g++ or c++) and about 1 GB of memory for some ten seconds each. Another
    torch needs another build. Exit code 1 when it fails.
    """
    from rich.console import Console

    from unicomm.comms.torch_bridge import UNITS
    from unicomm.profiler.bridge import BuildError, build

    console = Console(stderr=True)
    if part and part not in UNITS:
        raise typer.BadParameter(f"{part!r} is none of {', '.join(UNITS)}")
    for name, unit in UNITS.items():
        if part in ("", name):
            try:
                with console.status(f"compiling {name}"):
                    path = build(unit)
            except BuildError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
                raise typer.Exit(1) from None
            console.print(f"built {path}: {unit.text}", markup=False, soft_wrap=True)
