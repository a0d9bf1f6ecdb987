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
    connect: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="all hosts of a job of `unicomm run`, by the hub of one"),
    ] = None,
) -> None:
    """Watches the ranks on this host: what each does, for how long, and who waits for whom.

    Reads only their rings, so it costs them nothing and shows hung, stopped and killed ranks like any other.

        unicomm trace top
        unicomm trace top --once
        unicomm trace top --connect localhost      # the job of `unicomm run` that runs here, on all its hosts

    Exit code 2 when there is nothing to show.
    """
    if connect is not None:
        _connected(connect, folder, once, json, interval, everything)
        return
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.live import jobs as live
    from unicomm.flight_recorder.ring.folder import FolderError, rings_folder

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
    from unicomm.flight_recorder.live import top as view

    console = Console()
    if once:
        console.print(view.draw(snapshot, where))
    else:
        view.run(console, take, where, interval)


def _connected(
    where: str, folder: Path | None, once: bool, json: bool, interval: float, everything: bool
) -> None:
    """The same by a hub."""
    import json as json_module

    from rich.console import Console

    from unicomm.flight_recorder.live import top as view

    errors = Console(stderr=True)
    try:
        if folder is not None:
            raise ValueError("a folder or --connect, not both")
        from unicomm.launch.hub.protocol import HubError
        from unicomm.launch.hub.view import RemoteView
    except (ValueError, ImportError) as error:
        cure = ": pip install 'unicomm[hub]'" if isinstance(error, ImportError) else ""
        errors.print(f"{error}{cure}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(UNUSABLE) from None
    console = Console()
    try:
        with RemoteView(where) as remote:
            snapshot = remote.take(everything)
            if json:
                print(json_module.dumps(snapshot.as_data()))
            elif once:
                console.print(view.draw(snapshot, remote.address))
            else:
                view.run(console, lambda: remote.follow(everything), remote.address, interval)
    except HubError as error:
        errors.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(UNUSABLE) from None
