"""`unicomm trace top`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

UNUSABLE = 2


def top(
    folder: Annotated[
        Path | None, typer.Argument(help="folder with rings; default: where this user's processes write them")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one frame and end")] = False,
    json: Annotated[bool, typer.Option("--json", help="one frame as JSON")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="seconds between frames")] = 0.5,
    everything: Annotated[bool, typer.Option("--all", help="also jobs that are over")] = False,
) -> None:
    """Watches the ranks on this host: what each does, for how long, and who waits for whom.

    Reads only their rings, so it costs them nothing and shows hung, stopped and killed ranks like any other.

        unicomm trace top
        unicomm trace top --once

    Exit code 2 when there is nothing to show.
    """
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder import live
    from unicomm.flight_recorder.folder import FolderError, rings_folder

    errors = Console(stderr=True)
    try:
        where = rings_folder() if folder is None else folder
    except FolderError as error:
        errors.print(str(error), style="red")
        raise typer.Exit(UNUSABLE) from None

    def take() -> live.Snapshot:
        return live.look(where, everything)

    snapshot = take()
    if not snapshot.jobs and (once or json or not where.is_dir()):
        for finding in snapshot.findings:
            errors.print(f"cannot read {finding.path}: {finding.message}", style="red", soft_wrap=True)
        errors.print(
            f"no rings in {where}: no program with a communicator runs on this host as this user, or it keeps"
            " its rings elsewhere (UNICOMM_TRACE_DIR)",
            soft_wrap=True,
        )
        raise typer.Exit(UNUSABLE)
    if json:
        print(json_module.dumps(snapshot.as_data()))
        return
    from unicomm.flight_recorder import top as view

    console = Console()
    if once:
        console.print(view.draw(snapshot, where))
    else:
        view.run(console, take, where, interval)
