"""`unicomm bench`: measures the operations of this machine, for the forecasts of `unicomm rehearse`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def bench(
    save: Annotated[Path, typer.Option("--save", help="the topology file, which is made or added to")],
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=2, help="numbers of ranks; default: 2 and 4")
    ] = None,
    most: Annotated[
        int, typer.Option("--most", min=10, max=30, help="the largest size: 2 to this power")
    ] = 25,
) -> None:
    """Measures how long operations take, and saves the times as a topology file.

    Ranks that share a host are measured over what `unicomm run` chooses there. Under a launcher with one rank
    on each host, the times between hosts are measured and added.

        unicomm bench --save machine.toml
        unicomm rehearse --nproc-per-node 4 --topology machine.toml train.py
        unicomm run --nnodes 2 --nproc-per-node 1 ... -m unicomm bench --save machine.toml
    """
    if "WORLD_SIZE" in os.environ:
        from unicomm.rehearse.forecast.measure import save as measure

        measure(save, 1 << most)
        return
    for count in ranks or (2, 4):
        command = [sys.executable, "-m", "unicomm", "run", "--nproc-per-node", str(count), "-m", "unicomm"]
        done = subprocess.run([*command, "bench", "--save", str(save), "--most", str(most)], check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
