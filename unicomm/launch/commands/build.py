"""`unicomm build`: optional parts that need this machine's compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .trace import PlainGroup

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

    from unicomm.extensions.build_cache import BuildError
    from unicomm.extensions.build_torch_extension import build
    from unicomm.extensions.torch_extensions import EXTENSIONS

    console = Console(stderr=True)
    if part and part not in EXTENSIONS:
        raise typer.BadParameter(f"{part!r} is none of {', '.join(EXTENSIONS)}")
    for name, extension in EXTENSIONS.items():
        if part in ("", name):
            try:
                with console.status(f"compiling {name}"):
                    path = build(extension)
            except BuildError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
                raise typer.Exit(1) from None
            console.print(f"built {path}: {extension.purpose}", markup=False, soft_wrap=True)


@app.command("rocshmem")
def rocshmem(
    prefix: Annotated[
        Path | None, typer.Option("--rocshmem", help="Where rocSHMEM is installed; else ROCSHMEM_HOME, ROCm.")
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--offload-arch", help="A GPU target, such as gfx942; else those here."),
    ] = None,
    mpi: Annotated[
        Path | None,
        typer.Option(help="Where MPI is installed, if rocSHMEM was built with it; else by mpicc."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")] = False,
) -> None:
    """Builds what the backend rocshmem needs: a table of symmetric memory over this machine's rocSHMEM.

    Needs ROCm's hipcc (HIPCC, ROCM_PATH, else on the PATH) and rocSHMEM 2.0 or later. Another rocSHMEM, or
    another GPU, needs another build. Exit code 1 when it fails.
    """
    import shlex

    from rich.console import Console

    from unicomm.extensions.build_cache import BuildError
    from unicomm.extensions.build_rocshmem import build, find_tools, unit_path

    console = Console(stderr=True)
    try:
        tools = find_tools(prefix, targets or (), mpi)
        if dry_run:
            for command in tools.commands(unit_path()):
                print("HIP_PLATFORM=amd", shlex.join(command))
            return
        console.print(
            f"rocSHMEM {tools.version} in {tools.rocshmem}, for {', '.join(tools.targets)}",
            markup=False,
            soft_wrap=True,
        )
        with console.status("compiling, then linking device code: it may take minutes"):
            path = build(tools, lambda text: console.print(text, style="dim", markup=False, soft_wrap=True))
    except BuildError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"built {path}: the backend rocshmem uses it", markup=False, soft_wrap=True)
