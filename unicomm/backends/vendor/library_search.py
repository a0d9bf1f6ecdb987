"""A vendor's library as data: its names, and where it is looked for."""

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
    """What distinguishes libraries that have the same functions.

    Attributes:
        name: of the backend. title: the name in messages.
        sonames: names by which the dynamic loader finds the library.
        packages: Python packages that may contain it, as (import name, path within).
        cure: what to do if the library is missing.
    """

    name: str
    title: str
    sonames: tuple[str, ...]
    packages: tuple[tuple[str, str], ...]
    cure: str

    def find(self, open: Callable[[str, bool], T], path: str = "", built: Sequence[str] = ()) -> T:
        """Returns the result of the first `open(place, loaded)` that does not raise `OSError`.

        A copy that the process has loaded comes first (`loaded` is True), then `path`. Without `path`, files
        in `built`, in packages and of the system follow. Raises `UnsupportedError` if none opens.
        """
        tried = []
        places = [
            *((name, True) for name in self.sonames),
            *([(path, False)] if path else []),
            *((place, False) for place in built),
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
    """Returns the existing files among (import name of a package, path within it). Imports nothing."""
    found = []
    for package, path in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:  # the parent package is missing
            continue
        folders = (spec and spec.submodule_search_locations) or ()
        found += [Path(folder) / path for folder in folders if (Path(folder) / path).exists()]
    return found
