"""Imports that a process does once, so that the ranks that are forked from it share them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sysconfig
from pathlib import Path

#: Modules that almost every rank imports while it runs, often at its first use of an optimizer.
_SHARED = (
    *("torch.optim", "torch._dynamo", "torch.nn.parallel", "torch.distributed.device_mesh"),
    *("unicomm.c10d.process_group", "unicomm.c10d.torchcomms_import", "unicomm.c10d.store_deadline"),
    *("unicomm.c10d.subgroups", "unicomm.c10d.env_rendezvous", "unicomm.flight_recorder.recording.hook"),
)


def import_shared() -> None:
    """Imports what the ranks of every program need."""
    for name in _SHARED:
        importlib.import_module(name)


def import_for(program: Path) -> None:
    """Imports the installed modules that a program imports at its top, so that its ranks share them.

    Modules of the program itself are left to the ranks: they may ask for their rank when they are imported.
    A module that cannot be imported is left to the ranks, too, which then say why.
    """
    try:
        tree = ast.parse(program.read_text())
    except (SyntaxError, ValueError):  # the ranks say so
        return
    for node in tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in filter(_is_installed, names):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _is_installed(name: str) -> bool:
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    origin = "" if spec is None else spec.origin or ""
    return origin in ("built-in", "frozen") or any(origin.startswith(place + os.sep) for place in places)
