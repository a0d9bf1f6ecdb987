"""A vendor's library, as data: what it is called, and where it is looked for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unicomm.comms.errors import UnsupportedError

T = TypeVar("T")


@dataclass(frozen=True)
class VendorLibrary:
    """What tells libraries with the same functions apart.

    Attributes:
        name: of the backend. title: as people write it.
        sonames: that the loader knows it by.
        packages: Python packages that may bring it, as (import name, path within).
        cure: what to do when there is none.
    """

    name: str
    title: str
    sonames: tuple[str, ...]
    packages: tuple[tuple[str, str], ...]
    cure: str

    def find(self, open: Callable[[str, bool], T], path: str = "", made: Sequence[str] = ()) -> T:
        """The first that `open(place, loaded)` opens, which raises `OSError` where it cannot.

        What is in the process already comes first (`loaded`), then `path`, and then, where that is not given,
        files that this machine has `made`, a package's, the system's. Without any: `UnsupportedError`.
        """
        tried = []
        places = [
            *((name, True) for name in self.sonames),
            *([(path, False)] if path else []),
            *((place, False) for place in made),
            *((str(place), False) for place in in_packages(self.packages)),
            *((name, False) for name in self.sonames),
        ]
        for place, loaded in places:
            try:
                return open(place, loaded)
            except OSError as error:
                if not loaded:
                    why = str(error)
                    named = why if place in why else f"{place} ({why})"
                    tried.append(named if os.sep in place else place)
                    if place == path:
                        break
        raise UnsupportedError(
            f"{self.title} is not on this machine; looked for {', '.join(tried)}", hint=self.cure
        )


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
