"""The `unicomm` command, and ranks started from a notebook. Stands on all other packages.

cli.py     the command: puts its subcommands together
commands/  the options of each subcommand, and what they print
run/       `unicomm run`: torchrun with a folder for rings, a hub, and a verdict when ranks fail
rendezvous/  how the launchers of the hosts meet: torch's rendezvous, on stores that strangers do not reach
hub/       a process beside the launcher of each host: the live view, and the rings of all hosts in one folder
exporter/  a process beside the launcher that serves metrics of the ranks of its host (Prometheus)
doctor/    `unicomm doctor`: checks of this machine and installation
notebook/  processes that run functions of a notebook as ranks, call after call

job_token.py     the secret by which launchers, hubs and viewers of one job know each other
side_process.py  a process of ours beside the launcher, as the launcher sees it: the hub, the exporter

`unicomm.launch.notebook` is imported when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name == "notebook":
        return importlib.import_module(f"{__name__}.notebook")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
