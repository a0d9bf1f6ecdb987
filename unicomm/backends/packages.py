"""Libraries that come within Python packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path


def in_packages(packages: Sequence[tuple[str, str]]) -> list[Path]:
    """The files that are there, of (import name of a package, path within it). Imports nothing."""
    found = []
    for package, path in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:  # its parent is not there
            continue
        folders = (spec and spec.submodule_search_locations) or ()
        found += [Path(folder) / path for folder in folders if (Path(folder) / path).exists()]
    return found
