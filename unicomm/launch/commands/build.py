"""`unicomm build`: optional parts that this machine's compiler builds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import PlainGroup, print_error, print_line

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=PlainGroup)


@app.callback()
def _root() -> None:
    """Builds optional parts with this machine's compiler."""


@app.command("torch-bridge")
def torch_bridge(
    part: Annotated[
        str, typer.Option(help="only this part: record (torch's events) or symmetric (its symmetric memory)")
    ] = "",
) -> None:
    """Builds the parts that need torch's own ABI.

    These are torch's record_param_comms events, and its symmetric memory on CPU tensors. The build needs a
    C++ compiler (CXX, else g++ or c++), and about 1 GB of memory and ten seconds for each part. Build again
    after another torch was installed.

        unicomm build torch-bridge
        unicomm build torch-bridge --part record

    Exit code 1 when the build fails.
    """
    from rich.console import Console

    from unicomm.extensions.build_cache import BuildError
    from unicomm.extensions.build_torch_extension import build
    from unicomm.extensions.torch_extensions import EXTENSIONS

    console = Console(stderr=True)
    if part and part not in EXTENSIONS:
        raise typer.BadParameter(f"{part!r} is not one of {', '.join(EXTENSIONS)}")
    for name, extension in EXTENSIONS.items():
        if part in ("", name):
            try:
                with console.status(f"compiling {name}"):
                    path = build(extension)
            except BuildError as error:
                print_error(console, error)
                raise typer.Exit(1) from None
            print_line(console, f"built {path}: {extension.purpose}")


@app.command("rocshmem")
def rocshmem(
    prefix: Annotated[
        Path | None,
        typer.Option("--rocshmem", help="installation of rocSHMEM; default: ROCSHMEM_HOME, else ROCm's"),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--offload-arch", help="GPU target, such as gfx942; default: the GPUs here"),
    ] = None,
    mpi: Annotated[
        Path | None,
        typer.Option(help="installation of the MPI that rocSHMEM was built with; default: mpicc's"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print the commands")] = False,
) -> None:
    """Builds the part that the backend rocshmem needs: a unit over this machine's rocSHMEM.

    The build needs ROCm's hipcc (HIPCC, ROCM_PATH, else on the PATH) and rocSHMEM 2.0 or later. Build again
    after another rocSHMEM or another GPU was installed.

        unicomm build rocshmem --rocshmem /opt/rocshmem --offload-arch gfx942

    Exit code 1 when the build fails.
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
        print_line(console, f"rocSHMEM {tools.version} in {tools.rocshmem}, for {', '.join(tools.targets)}")
        with console.status("compiling, then linking device code; this may take minutes"):
            path = build(tools, lambda text: print_line(console, text, "dim"))
    except BuildError as error:
        print_error(console, error)
        raise typer.Exit(1) from None
    print_line(console, f"built {path}: the backend rocshmem uses it")
