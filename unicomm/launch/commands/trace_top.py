"""`unicomm trace top`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import (
    UNUSABLE,
    Gigabytes,
    end_without_package,
    folder_with_rings,
    in_bytes,
    print_error,
    print_line,
    print_unreadable,
)

if TYPE_CHECKING:
    from rich.console import Console

_FILE_COLUMNS = 120


def top(
    folder: Annotated[
        Path | None, typer.Argument(help="folder with rings; default: where this user's processes write them")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one frame and end")] = False,
    json: Annotated[bool, typer.Option("--json", help="print one frame as JSON")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="seconds between frames")] = 0.5,
    everything: Annotated[bool, typer.Option("--all", help="also show jobs that have ended")] = False,
    connect: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="all hosts of a job of `unicomm run`, through one of its hubs",
        ),
    ] = None,
    memory: Gigabytes = None,
) -> None:
    """Watches the ranks on this host: what each does, for how long, and which rank it waits for.

    Reads only the rings, so it costs the ranks nothing, and it also shows hung, stopped and killed ranks.

        unicomm trace top
        unicomm trace top --once
        unicomm trace top --interval 10 >> top.log   # whole frames, one below the other
        unicomm trace top --connect localhost   # the job of `unicomm run` on this host

    With --connect it ends with the job, and leaves the last frame.
    Exit code 2 when there is nothing to show.
    """
    if connect is not None:
        _connected(connect, folder, once, json, interval, everything)
        return
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.live import snapshot as live
    from unicomm.flight_recorder.memory import Memory

    errors = Console(stderr=True)
    where = folder_with_rings(folder, errors)

    def take() -> live.Snapshot:
        return live.look(where, everything, Memory(in_bytes(memory)))

    snapshot = take()
    if not snapshot.jobs and (once or json or not where.is_dir()):
        print_unreadable(errors, snapshot.findings)
        print_line(
            errors,
            f"no rings in {where}: no program with a communicator runs on this host as this user, or its"
            " rings are elsewhere (UNICOMM_TRACE_DIR)",
        )
        raise typer.Exit(UNUSABLE)
    if json:
        print(json_module.dumps(snapshot.as_data()))
        return
    from unicomm.flight_recorder.live import top as view

    console = _console()
    if once:
        console.print(view.draw(snapshot, where, console.width))
    else:
        view.run(console, take, where, interval)


def _console() -> Console:
    """Returns the output. A file has no width: there, lines have room for what a frame usually has."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS
    return console


def _connected(
    where: str, folder: Path | None, once: bool, json: bool, interval: float, everything: bool
) -> None:
    """Shows all hosts of a job, through a hub."""
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.live import top as view

    errors = Console(stderr=True)
    try:
        if folder is not None:
            raise ValueError("give a folder or --connect, not both")
        from unicomm.launch.hub.protocol import HubError
        from unicomm.launch.hub.view import HubEndedError, RemoteView
    except (ValueError, ImportError) as error:
        if isinstance(error, ImportError):
            end_without_package(error, "`unicomm trace top --connect`", "hub")
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
    console = _console()
    try:
        with RemoteView(where) as remote:
            snapshot = remote.take(everything)
            if json:
                print(json_module.dumps(snapshot.as_data()))
            elif once:
                console.print(view.draw(snapshot, remote.address, console.width))
            else:
                try:
                    view.run(console, lambda: remote.follow(everything), remote.address, interval)
                except HubEndedError as ended:
                    if console.is_terminal and remote.last is not None:  # the view has left the screen
                        console.print(view.draw(remote.last, remote.address, console.width))
                    print_line(errors, str(ended))
    except HubError as error:
        print_error(errors, error)
        raise typer.Exit(UNUSABLE) from None
